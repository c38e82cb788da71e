"""The binding's own launches: what they are given is counted and read, or refused with a word."""

from typing import Any

import pytest
import torch

from pycutfuse._loader import native

BINDING = native().binding
pytestmark = pytest.mark.skipif(BINDING is None, reason="the native binding is not built")


class Address:
    """Counts who asks for it; no GPU ever reads it."""

    def __init__(self, value: object = 4096) -> None:
        self.value, self.asked = value, 0

    def data_ptr(self) -> object:
        self.asked += 1
        return self.value


def bound(tail: str = "none", operands: int = 0, after: int = 0) -> Any:
    add, none = BINDING.OPS["add"], BINDING.Program([], [])
    first = BINDING.Program([n for at in range(operands) for n in (add, at)], [0.0, 0.0] * operands)
    second = BINDING.Program([n for at in range(after) for n in (add, at)], [0.0, 0.0] * after)
    code = BINDING.TAILS[tail]
    problem = BINDING.FusedProblem(64, 64, 64, first if operands else none, code, second, 0, 0)
    plan = BINDING.make_plan(problem, BINDING.DeviceProps())
    return BINDING.bind(plan, 64, 1, 64, 1, [0, 0, 1, 0] * operands, [0, 0, 1, 0] * after, 64)


def given(tensors: Any, **changed: Any) -> tuple[Any, ...]:
    numbers = {"out": 4096, "save": None, "workspace": 4096, "words": None}
    numbers |= {"momentum": 0.1, "eps": 1e-5, "promotion": 1.0, "stream": 0}
    return (*(numbers | changed).values(), tensors)


def reaches_the_library(launch: Any, arguments: tuple[Any, ...]) -> None:
    """All that the binding reads was right: the library then finds no GPU or refuses an address."""
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        launch(*arguments)
    assert "takes" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses would be read")
@pytest.mark.parametrize(
    ("tail", "operands", "after", "count"),
    [
        ("none", 0, 0, 3),
        ("none", 2, 0, 5),
        ("logsumexp", 1, 0, 4),
        ("batch_norm_train", 2, 1, 11),
        ("batch_norm_eval", 0, 0, 8),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_every_tensor_is_asked_once(
    tail: str, operands: int, after: int, count: int, kind: type
) -> None:
    launch = bound(tail, operands, after)
    for size in range(count + 2):
        tensors = [Address() for _ in range(size)]
        if size == count:
            reaches_the_library(launch, given(kind(tensors)))
            assert [tensor.asked for tensor in tensors] == [1] * count
        else:
            with pytest.raises(ValueError, match=f"takes {count} tensors; it was given {size}"):
                launch(*given(kind(tensors)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses would be read")
def test_an_address_is_a_number_a_tensor_or_none() -> None:
    launch = bound()
    for x in (4096, torch.empty(4), None, Address()):
        reaches_the_library(launch, given((x, 4096, None)))


def test_what_is_no_address_is_refused() -> None:
    launch = bound()
    with pytest.raises(AttributeError, match="data_ptr"):
        launch(*given(("x", 4096, None)))
    with pytest.raises(OverflowError):
        launch(*given((-1, 4096, None)))
    with pytest.raises(OverflowError):
        launch(*given((1 << 70, 4096, None)))
    with pytest.raises(TypeError):
        launch(*given((Address("text"), 4096, None)))


def test_what_is_no_number_is_refused() -> None:
    launch = bound("batch_norm_eval")
    for name in ("momentum", "eps", "promotion"):
        with pytest.raises(TypeError, match="real number"):
            launch(*given((4096,) * 8, **{name: "text"}))


def test_the_arguments_are_counted() -> None:
    launch = bound()
    with pytest.raises(TypeError, match="takes 9 arguments; it was given 8"):
        launch(*given((4096, 4096, None))[1:])
    with pytest.raises(TypeError, match="no sequence"):
        launch(*given(7))
    with pytest.raises(TypeError, match="keyword"):
        launch(*given((4096, 4096, None)), out=4096)


def test_a_launch_keeps_its_plan() -> None:
    launches = [bound("batch_norm_train", 2, 1) for _ in range(50)]
    for launch in launches:
        with pytest.raises(ValueError, match="takes 11 tensors"):
            launch(*given(()))


def test_no_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="Plan"):
        BINDING.bind(None, 64, 1, 64, 1, [], [], 64)


@pytest.mark.parametrize("parts", [(), (None,) * 24, tuple(range(24)), ((),) * 24], ids=str)
def test_a_replay_of_other_parts_is_refused(parts: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="made of other parts"):
        BINDING.replay(parts)
    with pytest.raises(TypeError):
        BINDING.replay(list(parts))
