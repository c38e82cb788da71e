"""The policy is a pure function of problem and device, and names a compiled kernel."""

import itertools
import re
from typing import Any

import pytest

from .native import binding

_C = binding()

SHAPES = (
    *((1, 1, 64), (128, 128, 64), (1000, 777, 333), (1024, 8192, 8192), (16384, 4096, 4096)),
    *((16384, 1024, 4096), (16896, 3072, 4096), (2**20, 64, 64), (64, 2**20, 64)),
)
DEVICES = (
    *(_C.DeviceProps(), _C.DeviceProps(sm_count=114), _C.DeviceProps(sm_count=1)),
    *(
        _C.DeviceProps(major=8, minor=0, sm_count=108),
        _C.DeviceProps(major=8, minor=6, sm_count=84),
    ),
    *(_C.DeviceProps(major=8, minor=9, sm_count=128), _C.DeviceProps(major=12, sm_count=170)),
)
KINDS = ((0, 0), (1, 0), (0, 1), (0, 2))  # precision, dtype: ieee, tf32, float16, bfloat16
KERNEL = ("tile_m", "tile_n", "cluster_m", "promote_k", "arch", "element")


def kernel(policy: object) -> tuple[int, ...]:
    """What names the compiled kernel; raster, swizzle and split_k are run-time arguments."""
    return tuple(getattr(policy, name) for name in KERNEL)


def device_name(device: Any) -> str:
    return f"{device.major}.{device.minor}-{device.sm_count}sm"


def why_not(m: int, n: int, k: int, device: object, precision: int = 0) -> str | None:
    empty = _C.Program([], [])
    problem = _C.FusedProblem(m, n, k, empty, 0, empty, precision, 0)
    reason: str | None = _C.why_not(problem, device)
    return reason


def test_compiled_kernels_are_distinct() -> None:
    kernels = [kernel(policy) for policy in _C.compiled_policies()]
    assert kernels
    assert len(set(kernels)) == len(kernels)


@pytest.mark.parametrize("device", DEVICES, ids=device_name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("precision", "dtype"), KINDS)
def test_selected_policy_is_compiled(
    shape: tuple[int, int, int], device: Any, precision: int, dtype: int
) -> None:
    policy = _C.select_policy(*shape, device, precision, dtype)
    assert kernel(policy) in [kernel(compiled) for compiled in _C.compiled_policies()]
    assert policy.arch == (90 if device.major == 9 else 80)
    assert policy.element == max(dtype, 1)
    assert (policy.promote_k > 0) == ((precision, dtype) == (0, 0))
    assert policy.raster in (0, 1)
    assert policy.swizzle >= 1
    assert _C.select_policy(*shape, device, precision, dtype) == policy


def test_printed_policy_can_be_pasted_back_as_code() -> None:
    for raster, name in ((0, "kAlongM"), (1, "kAlongN")):
        for element, dtype in ((1, "kFloat16"), (2, "kBFloat16")):
            policy = _C.GemmPolicy(128, 192, 2, 16, raster, 4, 3, 80, element)
            printed = f"GemmPolicy{{128, 192, 2, 16, Raster::{name}, 4, 3, 80, DType::{dtype}}}"
            assert repr(policy) == printed
            assert re.fullmatch(r"GemmPolicy\{[^{}\n]*\}", repr(policy))


def test_policies_compare_by_every_field() -> None:
    fields = (*KERNEL, "raster", "swizzle", "split_k")
    policy = _C.GemmPolicy(128, 128, 2, 64, 1, 4)
    assert policy == _C.GemmPolicy(128, 128, 2, 64, 1, 4)
    for name in fields:
        other = _C.GemmPolicy(128, 128, 2, 64, 1, 4)
        setattr(other, name, 0)
        assert other != policy, name
    assert policy != "policy"


@pytest.mark.parametrize("shape", [(-1, 8, 8), (8, -1, 8), (8, 8, -1)])
def test_invalid_problem_raises(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=str(shape[0])):
        _C.select_policy(*shape, _C.DeviceProps())


def test_overflowing_problem_raises_as_torch() -> None:
    with pytest.raises(RuntimeError, match="M=1099511627776"):
        _C.select_policy(2**40, 2**40, 8, _C.DeviceProps())


def test_problem_without_a_kernel_says_why() -> None:
    assert why_not(1024, 1024, 1024, _C.DeviceProps()) is None
    turing = _C.DeviceProps(major=7, minor=5)
    assert "7.5" in str(why_not(1024, 1024, 1024, turing))
    with pytest.raises(NotImplementedError, match=r"7\.5"):
        _C.select_policy(1024, 1024, 1024, turing)
    with pytest.raises(NotImplementedError, match=str(2**31)):
        _C.select_policy(2**31, 64, 64, _C.DeviceProps())


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_ieee_is_handed_over_where_it_was_not_measured(major: int, minor: int) -> None:
    device = _C.DeviceProps(major=major, minor=minor)
    assert why_not(64, 64, 16384, device) is None
    assert f"compute capability {major}.{minor}" in str(why_not(64, 64, 16385, device))
    assert why_not(64, 64, 16385, device, precision=1) is None
    assert why_not(64, 64, 16385, _C.DeviceProps()) is None


@pytest.mark.parametrize(
    ("shape", "tile", "promote_k"),
    [
        ((16384, 4096, 4096), 128, 32),
        ((16384, 4096, 128), 128, 16),
        ((300, 300, 2047), 64, 16),  # few tiles: blocked sums
        ((300, 300, 2048), 64, 32),
    ],
)
def test_sm80_accuracy_rules(shape: tuple[int, int, int], tile: int, promote_k: int) -> None:
    policy = _C.select_policy(*shape, _C.DeviceProps(major=8, sm_count=108))
    assert (policy.tile_m, policy.tile_n, policy.promote_k) == (tile, tile, promote_k)


@pytest.mark.parametrize(
    ("shape", "promote_k"),
    [
        ((16384, 4096, 128), 16),  # small K: single truncations would show
        ((16384, 4096, 129), 64),
        ((300, 300, 2047), 16),  # few tiles: cuBLAS splits K and is more accurate than usual
        ((300, 300, 2048), 64),
        ((1024, 8192, 8192), 64),
    ],
)
def test_finest_promotion_where_pytorch_is_most_accurate(
    shape: tuple[int, int, int], promote_k: int
) -> None:
    assert _C.select_policy(*shape, _C.DeviceProps()).promote_k == promote_k


def test_wide_tiles_need_many_tiles() -> None:
    # They have no registers for blocked sums, so they must not meet cuBLAS's split-K accuracy.
    for k in (64, 2048, 8192):
        assert _C.select_policy(128, 192, k, _C.DeviceProps()).tile_n == 128


@pytest.mark.parametrize(
    ("shape", "dtype", "raster", "swizzle"),
    [
        ((16384, 4096, 4096), 0, 1, 4),  # along N, the shorter side
        ((16384, 2048, 4096), 0, 1, 1),
        ((1024, 8192, 8192), 0, 0, 1),
        ((8192, 8192, 8192), 0, 1, 4),
        ((16384, 4096, 4096), 2, 0, 8),  # 16 x 8 tiles at a time
        ((16384, 4096, 4096), 1, 0, 8),
        ((16384, 2048, 8192), 2, 1, 1),  # they are already
        ((16384, 4096, 2048), 2, 1, 1),  # the weight stays in L2
        ((16384, 4096 + 256, 4096), 2, 1, 1),  # columns would be padded,
        ((33 * 256, 4096, 4096), 2, 1, 1),  # and rows
        ((1024, 8192, 8192), 2, 0, 1),
    ],
)
def test_blocks_in_flight_share_operands(
    shape: tuple[int, int, int], dtype: int, raster: int, swizzle: int
) -> None:
    policy = _C.select_policy(*shape, _C.DeviceProps(), 0, dtype)
    assert (policy.raster, policy.swizzle) == (raster, swizzle)


def test_few_tiles_are_empty() -> None:
    """CUTLASS's scheduler rounds both sides up to the group, and empty tiles take time too."""
    grouped = 0
    for tiles_m, tiles_n in itertools.product((32, 33, 34, 36, 64, 125, 128, 250), repeat=2):
        for precision, dtype in KINDS:
            shape = (128 * tiles_m - 7, 128 * tiles_n - 3, 4096)
            policy = _C.select_policy(*shape, _C.DeviceProps(), precision, dtype)
            if policy.swizzle == 1:
                continue
            grouped += 1
            clusters = -(-shape[0] // (policy.tile_m * policy.cluster_m))
            columns = -(-shape[1] // policy.tile_n)
            padded = [-(-side // policy.swizzle) * policy.swizzle for side in (clusters, columns)]
            assert padded[0] * padded[1] <= clusters * columns * 33 / 32, (shape, policy)
    assert grouped > 0


# Of these, groups of 4 tiles would have no room for the empty ones' partials.
@pytest.mark.parametrize(
    ("shape", "precision", "dtype"),
    [((16384, 32000, 4096), 0, 2), ((4608, 4100, 64), 0, 0), ((16384, 10000, 2048), 1, 0)],
)
def test_logsumexp_has_no_tile_without_columns(
    shape: tuple[int, int, int], precision: int, dtype: int
) -> None:
    device, nothing = _C.DeviceProps(), _C.Program([], [])
    leading = (shape[2], shape[2]) if dtype else (0, 0)
    problem = _C.FusedProblem(*shape, nothing, 3, nothing, precision, dtype, False, *leading)
    policy = _C.make_plan(problem, device).policy
    if dtype:  # turned over, which has partials of whole tiles alone
        policy.swizzle = 4
        assert _C.make_plan(problem, device, policy).policy == policy
        policy = _C.GemmPolicy(128, 256, 2, 0, 1, element=dtype)
    policy.swizzle = 4
    if -(-shape[1] // policy.tile_n) % 4 == 0:
        assert _C.make_plan(problem, device, policy).policy == policy
    else:
        with pytest.raises(NotImplementedError, match=f"{shape[1]} columns with empty tiles"):
            _C.make_plan(problem, device, policy)


@pytest.mark.parametrize("tail", [0, 1, 3])
def test_a_policy_of_nothing_is_refused(tail: int) -> None:
    device, nothing = _C.DeviceProps(), _C.Program([], [])
    problem = _C.FusedProblem(1024, 1024, 1024, nothing, tail, nothing, 0, 0)
    for policy in (_C.GemmPolicy(0, 0), _C.GemmPolicy(96, 0), _C.GemmPolicy(128, 128, 2, 64, 0, 0)):
        with pytest.raises((NotImplementedError, ValueError), match="GemmPolicy"):
            _C.make_plan(problem, device, policy)
    skinny = _C.GemmPolicy(0, 0)
    skinny.arch = 0
    if tail:
        with pytest.raises(NotImplementedError, match="splits K"):
            _C.make_plan(problem, device, skinny)


@pytest.mark.parametrize("name", ["swizzle", "split_k"])
@pytest.mark.parametrize("number", [0, -1, 1025, 2**31 - 1])
def test_numbers_of_a_policy_have_bounds(name: str, number: int) -> None:
    nothing = _C.Program([], [])
    problem = _C.FusedProblem(1024, 1024, 1024, nothing, 0, nothing, 0, 0)
    policy = _C.make_plan(problem, _C.DeviceProps()).policy
    setattr(policy, name, number)
    with pytest.raises((ValueError, NotImplementedError), match=r"must be (from|at least) 1"):
        _C.make_plan(problem, _C.DeviceProps(), policy)


def test_what_passes_over_the_result_cannot_take_is_refused_before() -> None:
    nothing, columns = _C.Program([], []), 65535 * 128
    for m, tail in ((256, 1), (8, 0)):
        for n, said in ((columns, False), (columns + 1, True)):
            problem = _C.FusedProblem(m, n, 64, nothing, tail, nothing, 0, 0)
            reason = _C.why_not(problem, _C.DeviceProps())
            assert (reason is not None and "over the result" in reason) == said
    assert why_not(2**30 - 64, 64, 64, _C.DeviceProps()) is None
    assert "2^30 - 64" in str(why_not(64, 64, 2**30 - 63, _C.DeviceProps()))
