"""What a logsumexp decides on the host: which elements each row reads, and how states merge."""

import itertools
import math

import pytest
import torch

from ..cases.logsumexp import EMPTY, KERNEL, PLAIN, VIEWS, ReduceCase
from .native import INF, MAX, NAN, SPECIAL, host_module

host = host_module()
SMS = 132


def plan(x: torch.Tensor, dims, *, offsets: bool = False, sm_count: int = SMS, dtype: int = 0):
    reduced = sum(1 << d for d in dims)
    return host.logsumexp_plan(x.shape, x.stride(), reduced, dtype, sm_count, offsets)


@pytest.mark.parametrize("case", PLAIN + VIEWS + EMPTY, ids=str)
def test_offsets_are_those_of_the_elements(case: ReduceCase) -> None:
    x = case.draw()
    found = plan(x, case.dims, offsets=True)
    kept = [d for d in range(x.dim()) if d not in case.dims]
    rows = list(itertools.product(*(range(x.shape[d]) for d in kept)))
    assert (found["rows"], found["rows"] * found["length"]) == (len(rows), x.numel())
    assert sorted(found["kept_out"]) == list(range(len(rows)))

    def offsets(dims, index) -> int:
        return sum(i * x.stride(d) for d, i in zip(dims, index, strict=True))

    inner = itertools.product(*(range(x.shape[d]) for d in case.dims))
    if rows:
        expected = sorted(offsets(case.dims, index) for index in inner)
        assert sorted(found["reduced"]) == expected
    for start, at in zip(found["kept"], found["kept_out"], strict=True):
        assert start == offsets(kept, rows[at])


@pytest.mark.parametrize("case", KERNEL + PLAIN + EMPTY, ids=str)
@pytest.mark.parametrize("sm_count", [1, 78, 132])
@pytest.mark.parametrize("dtype", [0, 1, 2])
def test_a_plan_covers_its_problem(case: ReduceCase, sm_count: int, dtype: int) -> None:
    x = case.view(torch.empty(case.shape, device="meta"))
    found = plan(x, case.dims, sm_count=sm_count, dtype=dtype)
    splits, part, length = found["splits"], found["split_length"], found["length"]
    if found["rows"] == 0:
        return
    assert splits == max(1, -(-length // part))
    assert found["workspace_bytes"] == (8 * splits * found["rows"] if splits > 1 else 0)
    widths = {2**i for i in range(9)} if found["columns"] else {8, 32, 256}
    assert found["width"] in widths
    threads = 256 // found["width"] if found["columns"] else found["width"]
    assert part % (threads * (8 if found["columns"] else 16)) == 0
    if found["vectors"]:
        assert part % (4 if dtype == 0 else 8) == 0


@pytest.mark.parametrize(
    ("shape", "strides", "dims", "text"),
    [
        ((70000, 128), (128, 1), (1,), "rows of 8 threads, vectors"),
        ((70000, 127), (127, 1), (1,), "rows of 8 threads"),
        ((16384, 1024), (1024, 1), (1,), "rows of 32 threads, vectors"),
        ((16384, 1024), (1025, 1), (1,), "rows of 32 threads"),
        ((2000, 8192), (8192, 1), (1,), "rows of 256 threads, vectors"),
        ((1, 1 << 22), (1 << 22, 1), (1,), "rows of 256 threads, vectors, 512 splits"),
        ((1 << 20, 5), (5, 1), (1,), "columns, 256 a block"),
        ((100, 1 << 20), (1 << 20, 1), (0,), "columns, 32 a block"),
        ((1 << 20, 3), (3, 1), (0,), "columns, 4 a block, 512 splits"),
    ],
)
def test_readings(shape, strides, dims, text: str) -> None:
    found = host.logsumexp_plan(shape, strides, sum(1 << d for d in dims), 0, SMS, False)
    assert found["text"] == text


def test_dimensions_are_merged_or_refused() -> None:
    x = torch.empty((2,) * 40, device="meta")
    assert plan(x, range(20))["length"] == 2**20
    code, message = plan(x, range(0, 40, 2))
    assert "20 kept dimensions" in message
    assert host.code_name(code) == "not supported"
    assert plan(x[(0,) * 24], range(0, 16, 2))["rows"] == 2**8


@pytest.mark.parametrize(
    ("sizes", "words"), [((-1, 2), "-1"), ((2**62, 4), "2^63"), ((0, 2**62, 2**62), "2^63")]
)
def test_impossible_sizes_are_refused(sizes, words: str) -> None:
    code, message = host.logsumexp_plan(sizes, (0,) * len(sizes), 0, 0, SMS, False)
    assert words in message
    assert host.code_name(code) == "invalid value"


def check(found: float, values) -> None:
    expected = float(torch.logsumexp(torch.tensor(values, dtype=torch.float64), 0))
    if not math.isfinite(expected):
        assert found == expected or (math.isnan(found) and math.isnan(expected)), values
    elif expected > MAX:
        assert found in (MAX, INF)
    else:
        assert abs(found - expected) <= 4 * 2**-24 * max(abs(expected), 1.0), values


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_special_values_as_in_torch(threads: int) -> None:
    values = (-INF, -MAX, -1.0, 0.0, 1e-40, 88.8, MAX, INF, NAN)
    for count in (1, 2, 3):
        for chosen in itertools.product(values, repeat=count):
            check(host.logsumexp_of_values(chosen, threads)[2], chosen)
    check(host.logsumexp_of_values([], threads)[2], [])
    for value in SPECIAL:
        check(host.logsumexp_of_values([value] * 37, threads)[2], [value] * 37)


@pytest.mark.parametrize("threads", [1, 4, 32])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e6])
def test_values_in_any_order(threads: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(1000, generator=generator) * scale).sort().values
    for order in (values, values.flip(0), values[torch.randperm(1000, generator=generator)]):
        largest, _, found = host.logsumexp_of_values(order.tolist(), threads)
        assert largest == float(values[-1])
        check(found, order.tolist())


@pytest.mark.parametrize(
    ("partials", "expected"),
    [
        ([], -INF),
        ([(-INF, 0.0), (-INF, 0.0)], -INF),
        ([(-INF, 0.0), (2.0, 1.0)], 2.0),
        ([(2.0, 1.0), (-INF, 0.0)], 2.0),
        ([(0.0, 1.0), (0.0, 1.0)], math.log(2)),
        ([(INF, INF), (5.0, 2.0)], INF),
        ([(INF, INF), (-INF, 0.0), (INF, INF)], INF),
        ([(5.0, NAN), (INF, INF)], NAN),
        ([(NAN, 1.0), (5.0, 2.0)], NAN),
        ([(5.0, 2.0), (NAN, NAN), (-INF, 0.0)], NAN),
        ([(-INF, NAN), (5.0, 2.0)], NAN),
        ([(3.0, 0.25), (1.0, 4.0)], math.log(0.25 * math.exp(3.0) + 4 * math.exp(1.0))),
        ([(MAX, 1.0), (-MAX, 1.0)], MAX),
    ],
)
def test_partials_of_an_epilogue(partials, expected: float) -> None:
    for order in itertools.permutations(partials):
        found = host.merged_logsumexp(order)
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
