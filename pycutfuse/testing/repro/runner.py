"""Run a range of seeds in child processes: a dead or hanging one costs the seed that it was at."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from pycutfuse.testing.repro import FAILURES, FAMILIES, VERDICTS, Outcome, check

CHUNK = 250  # seeds of one process: bounds what a leak may grow to
STARTUP_S = 180.0  # importing torch and starting the device, on a loaded machine
# log2 of the largest M * N * K
LIMITS = {"linear": {"cuda": 33, "cpu": 20}, "conv": {"cuda": 31, "cpu": 20}}
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Job:
    """What all seeds of a run share; `limit` is the largest M * N * K, as a power of two."""

    family: str
    device: str
    limit: int
    timeout_s: float = 120.0

    def run(self, seed: int) -> Outcome:
        """Draw the configuration of `seed` and check it, in this process."""
        return check(FAMILIES[self.family](seed, 2**self.limit), self.device)

    def command(self, seed: int) -> str:
        """How to see `seed` again."""
        words = f"python -m pycutfuse.testing.repro --family {self.family} --seed {seed}"
        kind = self.device.split(":")[0]
        other = f" --limit {self.limit}" if self.limit != LIMITS[self.family][kind] else ""
        return f"{words} --device {self.device}{other}"


class ChildFailedError(RuntimeError):
    """A child process did not even start."""


def child(sender: Connection, job: Job, seeds: Sequence[int]) -> None:
    """Body of a child: send "ready", then the outcome of each seed."""
    if job.device == "cpu":
        torch.set_num_threads(1)  # small problems: threads would only wait for each other
    else:
        torch.ones(1, device=job.device).cpu()
    sender.send("ready")
    for seed in seeds:
        outcome = job.run(seed)
        sender.send(outcome)
        if outcome.lost:
            break
    sender.close()


def run_range(
    job: Job, seeds: Sequence[int], body: Callable[..., None] = child
) -> Iterator[Outcome]:
    """Outcomes of `seeds` in order; a process that dies or hangs is a crash of its seed.

    Raises
    ------
    ChildFailedError
        If a child process cannot start.
    """
    at = 0
    while at < len(seeds):
        for outcome in _run_chunk(job, seeds[at : at + CHUNK], body):
            at += 1
            yield outcome


def _run_chunk(job: Job, seeds: Sequence[int], body: Callable[..., None]) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=body, args=(sender, job, seeds), daemon=True)
    # Ctrl-C is for this process, which ends the child; ignoring it is inherited.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    sender.close()
    try:
        if (answer := _receive(receiver, STARTUP_S)) != "ready":
            raise ChildFailedError(
                f"a child process on {job.device} ended before its first seed: "
                f"{_ending(process, answer, STARTUP_S)}"
            )
        for seed in seeds:
            answer = _receive(receiver, job.timeout_s)
            if not isinstance(answer, Outcome):
                ending = _ending(process, answer, job.timeout_s)
                yield Outcome(seed, "crash", ending, lost=True)
                return
            yield answer
            if answer.lost:
                return
    finally:
        process.kill()
        process.join()
        receiver.close()


def _receive(receiver: Connection, timeout_s: float) -> Any:
    """The next message, "late", or None if the other side is gone."""
    try:
        return receiver.recv() if receiver.poll(timeout_s) else "late"
    except (EOFError, OSError):
        return None


def _ending(process: BaseProcess, answer: Any, timeout_s: float) -> str:
    """How a child ended that gave no outcome; one that hangs is killed."""
    if answer == "late":
        return f"no answer within {timeout_s:g} s"
    process.join()
    code = process.exitcode
    if code is not None and code < 0:
        return f"the process ended with {signal.Signals(-code).name}"
    return f"the process ended with exit status {code}"


@dataclass
class Totals:
    """Counts of a run."""

    verdicts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(VERDICTS, 0)))
    detours: Counter[str] = field(default_factory=Counter)
    mechanisms: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)
    worst: Outcome | None = None
    worst_gradient: Outcome | None = None
    above_promise: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.verdicts[outcome.verdict] += 1
        self.detours.update(outcome.detours)
        self.mechanisms.update([outcome.mechanism] if outcome.mechanism else [])
        if outcome.verdict in FAILURES:
            self.failures.append(outcome)
            return
        self.above_promise += outcome.ratio > 1.0
        if self.worst is None or outcome.ratio > self.worst.ratio:
            self.worst = outcome
        if self.worst_gradient is None or (
            outcome.gradient_ratio > self.worst_gradient.gradient_ratio
        ):
            self.worst_gradient = outcome

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, crashed or was refused in a wrong way."""
        return not self.failures

    def detour_count(self, kind: str) -> int:
        """Calls that ended as `kind`: ``fallback`` or ``handover``."""
        return sum(count for name, count in self.detours.items() if name.startswith(kind))
