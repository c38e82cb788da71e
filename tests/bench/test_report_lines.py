"""Lines under the tables: many of one kind are one line."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pycutfuse.bench import report, storage
from pycutfuse.bench.results import Fuzz, SizesResult

from .test_report import _run, _size

ROOT = Path(__file__).parents[2]


def test_reasons_that_differ_in_numbers_are_counted_together():
    sizes = [_size(1.0, path="hand-over", reason=f"{n}x3x{n}: {n} against 7 us") for n in (1, 25)]
    other = _size(1.0, path="hand-over", reason="K=3: too small")
    markdown = report.markdown(_run(sizes=[SizesResult("sizes", "ieee", [*sizes, other])]))
    assert "sizes (ieee): 2 hand-over: 1x3x1: 1 against 7 us, and others alike" in markdown
    assert "sizes (ieee): 1 hand-over: K=3: too small\n" in markdown + "\n"
    assert "25x3x25" not in markdown


def test_fuzzed_seeds_that_follow_each_other_are_one_line():
    def fuzz(first, last, **counts):
        return Fuzz("linear", (first, last), "H200", counts, 1, 2)

    parts = [fuzz(50, 99, correct=49, wrong=1), fuzz(0, 49, correct=50), fuzz(200, 209, correct=10)]
    assert report.fuzz_lines(parts) == [
        "Fuzzed linear, seeds 0 to 99 on H200: 100 configurations, 99 correct, 1 wrong; "
        "2 hand-overs, 4 fallbacks",
        "Fuzzed linear, seeds 200 to 209 on H200: 10 configurations, 10 correct; "
        "1 hand-overs, 2 fallbacks",
    ]


def test_what_fuzzed_convolutions_ran_by_is_counted():
    parts = [
        Fuzz("conv", (0, 1), "H200", {"correct": 2}, mechanisms={"shift": 1, "direct": 1}),
        Fuzz("conv", (2, 3), "H200", {"correct": 2}, mechanisms={"shift": 2}),
    ]
    assert report.fuzz_lines(parts) == [
        "Fuzzed conv, seeds 0 to 3 on H200: 4 configurations, 4 correct; "
        "0 hand-overs, 0 fallbacks; 3 by shift, 1 by direct"
    ]


def test_sizes_that_were_timed_again_are_counted():
    sizes = [replace(_size(1.0), first_ratio=0.9), replace(_size(0.9), first_ratio=0.8), _size(1.0)]
    markdown = report.markdown(_run(sizes=[SizesResult("sizes", "ieee", sizes)]))
    assert "sizes (ieee): 2 below 0.95x at first, timed again" in markdown
    assert "timed again" not in report.markdown(
        _run(sizes=[SizesResult("sizes", "ieee", [_size(1.0)])])
    )


def test_a_readme_keeps_its_line_ends(tmp_path):
    for end in (b"\r\n", b"\n"):
        path = tmp_path / "README.md"
        path.write_bytes(end.join([b"a", report.BEGIN.encode(), report.END.encode(), b"b", b""]))
        assert report.update_readme(path, _run())
        written = path.read_bytes()
        assert written.count(end) == written.count(b"\n") > 5
        assert (b"\r" in written) is (b"\r" in end)
        assert not report.update_readme(path, _run())


@pytest.mark.parametrize(
    ("section", "measured"),
    [(None, "h200-ieee.json"), ("tiers", "h200.json"), ("convolutions", "h200-conv.json")],
)
def test_readme_says_what_was_measured(section: str | None, measured: str, tmp_path):
    """Or: python -m pycutfuse bench --from-json ... --update-readme README.md --section ..."""
    copy = shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    run = storage.read(ROOT / "benchmarks" / "results" / measured)
    assert not report.update_readme(copy, run, section)
