"""Kernels of linear layers on the host; test_kernels.py runs this file with plugin.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import (
    LAYOUTS,
    exact_promotion,
    forced_policy,
    generate,
    integers,
    kinds_of,
    small_policies,
    strided,
)
from pycutfuse.testing.forcing import KINDS, Kind

from ..cases import moments, small, turned
from . import session
from .plugin import binding

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return integers(shape, seed=seed)


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return generate("randn", shape, seed=seed)


@pytest.mark.parametrize("policy", binding.compiled_policies(), ids=repr)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("size", [(300, 200, 458), (65, 17, 64)], ids=str)
def test_linear_layers(policy: object, layout: str, size: tuple[int, int, int]) -> None:
    (m, n, k), kind = size, kinds_of(policy)[0]
    x, weight = (strided(whole(s, i).to(kind[0]), layout) for i, s in enumerate([(m, k), (n, k)]))
    vector, full = whole((n,), 2).to(kind[0]), whole((m, n), 3).to(kind[0])
    steps = (pcf.mul(vector), pcf.add(full), pcf.leaky_relu(0.5))
    with forced_policy(policy), exact_promotion():
        result = pcf.ops.linear(x, weight, epilogue=steps, precision=kind[1])
    expected = F.linear(x.double(), weight.double()) * vector.double() + full.double()
    assert torch.equal(result, F.leaky_relu(expected, 0.5).to(kind[0]))


@pytest.mark.parametrize(
    "policy", [p for p in binding.compiled_policies() if p.arch == 90], ids=repr
)
@pytest.mark.parametrize("n", [200, 77])
def test_bounds_after_affine_steps(policy: object, n: int) -> None:
    """In rows of whole pieces of 16 bytes and not, beside rows and columns that are not finite."""
    m, k, inf, kind = 150, 136, float("inf"), kinds_of(policy)[0]
    x, weight, vector, other = (
        whole(s, i).to(kind[0]) for i, s in enumerate([(m, k), (n, k), (n,), (n,)])
    )
    x[3, 5], x[140, 7], weight[60, 2] = inf, -inf, float("nan")
    for bounds in (pcf.relu(), pcf.clamp(-20.0, 90.0), pcf.minimum(3.0)):
        steps = (pcf.mul(vector), pcf.add(other), bounds)
        with forced_policy(policy), exact_promotion():
            result = pcf.ops.linear(x, weight, epilogue=steps, precision=kind[1])
        value = F.linear(x.double(), weight.double()) * vector.double() + other.double()
        expected = {
            "relu": value.relu(),
            "clamp": value.clamp(-20.0, 90.0),
            "minimum": value.clamp(max=3.0),
        }[bounds.op]
        torch.testing.assert_close(result, expected.to(kind[0]), rtol=0, atol=0, equal_nan=True)


def trailing(m: int, n: int, k: int, tier: str) -> tuple[object, object]:
    """What is selected for a linear layer, and that with two blocks that split its last rows."""
    device = binding.DeviceProps(sm_count=4)
    policies = [binding.select_policy(m, n, k, device, int(tier == "tf32")) for _ in range(2)]
    policies[1].trailing_blocks = 2
    return policies[0], policies[1]


@pytest.mark.parametrize("tier", ["ieee", "tf32"])
@pytest.mark.parametrize("size", [(130, 1000, 520), (1100, 120, 520), (100, 120, 520)], ids=str)
def test_rows_that_are_split_while_others_are_multiplied(
    size: tuple[int, int, int], tier: str
) -> None:
    """Of the weight, of x and of neither, a whole number of tiles and not, finite and not."""
    (m, n, k), inf = size, float("inf")
    x, weight = randn((m, k), 1), randn((n, k), 2)
    x[-1] *= 2.0**80
    for one in (x, weight):
        one[-2, 3], one[-70, 5], one[-70, 7], one[3] = inf, inf, -inf, 0.0
    results = []
    plain, trails = trailing(*size, tier)
    for policy in (plain, trails):
        with forced_policy(policy):
            results.append(pcf.ops.linear(x, weight, precision=tier))
            stages = str(pcf.explain(pcf.ops.linear, x, weight, precision=tier))
        assert ("split the other rows on 2 SMs" in stages) == (policy is trails)
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))


def test_blocks_that_do_not_run_at_the_same_time_leave_batch_norm_to_a_pass(
    monkeypatch: pytest.MonkeyPatch, emulated: None
) -> None:
    """Those of another cooperative launch do; both round alike."""
    session.use_device(monkeypatch, binding.DeviceProps(sm_count=6))
    m, n, k = 200, 500, 520
    x, weight = randn((m, k), 1), randn((n, k), 2)
    results = []
    for blocks in (0, 2):
        policy = trailing(m, n, k, "ieee")[0]
        policy.raster, policy.swizzle, policy.trailing_blocks = 0, 1, blocks
        mean, var, count = torch.zeros(n), torch.ones(n), torch.tensor(3)
        norm = {"running_mean": mean, "running_var": var, "num_batches_tracked": count}
        options = {**norm, "training": True, "after": (pcf.relu(),)}
        with forced_policy(policy):
            stages = str(pcf.explain(pcf.ops.linear_batch_norm, x, weight, **options))
            result = pcf.ops.linear_batch_norm(x, weight, **options)
        results.append((result, mean, var, count))
        assert ("unless all blocks ran" in stages) == (blocks > 0)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    exact = F.batch_norm(F.linear(x.double(), weight.double()), None, None, training=True).relu()
    torch.testing.assert_close(results[1][0].double(), exact, rtol=1e-5, atol=1e-5)
    assert int(results[1][3]) == 4


@pytest.mark.parametrize("policy", small_policies(), ids=repr)
@every_kind
@pytest.mark.parametrize("size", [*small.SIZES, small.DEEP[0]], ids=str)
def test_small_products(policy: object, kind: Kind, size: tuple[int, int, int]) -> None:
    if small.reaches(policy, size[2]):
        small.check_whole_numbers(policy, kind, size, "cpu")


@pytest.mark.parametrize("policy", small_policies(), ids=repr)
def test_small_products_of_every_layout(policy: object) -> None:
    for layout in LAYOUTS:
        for kind in KINDS[::3]:
            small.check_whole_numbers(policy, kind, (130, 70, 33), "cpu", layout)
    for dtype in (torch.float32, torch.bfloat16):
        small.check_alignments(policy, "cpu", dtype)
    small.check_not_finite(policy, "cpu")


@every_kind
@pytest.mark.parametrize("size", [(3, 70, 130), (100, 16, 64), (1, 1, 5)], ids=str)
def test_few_rows_or_columns(kind: Kind, size: tuple[int, int, int]) -> None:
    m, n, k = size
    k += -k % 8 if kind[0] is not torch.float32 else 59
    x, weight, full = (whole(s, 1).to(kind[0]) for s in ((m, k), (n, k), (m, n)))
    with exact_promotion():
        result = pcf.ops.linear(x, weight, epilogue=(pcf.add(full),), precision=kind[1])
    expected = F.linear(x.double(), weight.double()) + full.double()
    assert torch.equal(result, expected.to(kind[0]))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=str)
@pytest.mark.parametrize("size", [(70, 130, 64), (5, 70, 72)], ids=str)
def test_logsumexp_of_logits_that_are_not_stored(kind: Kind, size: tuple[int, int, int]) -> None:
    m, n, k = size
    x, weight, bias = (randn(s, 1).to(kind[0]) for s in ((m, k), (n, k), (n,)))
    x[1] *= 50
    result = pcf.ops.linear_logsumexp(x, weight, epilogue=(pcf.add(bias),), precision=kind[1])
    expected = F.linear(*(one.double() for one in (x, weight, bias))).logsumexp(-1)
    rtol = 1e-6 if kind == KINDS[0] else 1e-3
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("size", [(300, 200, 130), (700, 136, 64)], ids=str)
@pytest.mark.parametrize("policy", [p for p in binding.compiled_policies() if p.arch == 90])
def test_batch_norm_of_a_linear_layer(policy: object, size: tuple[int, int, int]) -> None:
    """In training: blocks that run at once exchange their moments, of more rows a pass follows."""
    (m, n, k), kind = size, kinds_of(policy)[0]
    x, weight = (whole(shape, 1).to(kind[0]) for shape in ((m, k), (n, k)))
    ours = [randn((n,), 5), generate("rand", (n,), seed=6) + 0.5]
    exact = [one.double() for one in ours]
    with forced_policy(policy), exact_promotion():
        result = pcf.ops.linear_batch_norm(
            x, weight, running_mean=ours[0], running_var=ours[1], training=True, precision=kind[1]
        )
    z = F.linear(x.double(), weight.double()).to(kind[0]).double()  # as it is stored, and measured
    expected = F.batch_norm(z, *exact, training=True)
    close = 1e-5 if kind[0] is torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), expected, rtol=close, atol=close)
    for own, value in zip(ours, exact, strict=True):
        torch.testing.assert_close(own.double(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", moments.OFFSETS)
@pytest.mark.parametrize(("m", "n"), [(300, 330), (2100, 330), (300, 328), (2100, 328)])
def test_columns_that_are_rounded(m: int, n: int, offset: float, dtype: torch.dtype) -> None:
    moments.check_statistics(m, n, offset, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_columns_of_extremes(dtype: torch.dtype) -> None:
    moments.check_extremes(1100, dtype, "cpu")  # more than exchange their moments


@pytest.mark.parametrize("size", turned.SIZES, ids=str)
def test_layers_that_are_turned_over(size: tuple[int, int, int]) -> None:
    turned.check_whole_numbers(size, "cpu")


def test_layers_that_are_not_turned_over_for_their_tensors() -> None:
    turned.check_others_are_straight("cpu")


def test_ranges_of_turned_layers() -> None:
    turned.check_ranges("cpu")


def test_turned_layers_that_are_not_finite() -> None:
    turned.check_not_finite("cpu")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0**14])
def test_batch_norm_of_turned_layers(training: bool, factor: float) -> None:
    turned.check_batch_norm(training, factor, "cpu")


@pytest.mark.parametrize("raster", [0, 1])
@pytest.mark.parametrize("size", turned.NARROW_SIZES, ids=str)
def test_narrow_layers_that_are_turned_over(size: tuple[int, int, int], raster: int) -> None:
    turned.check_narrow(size, raster, "cpu", turned.NARROW[raster])


@pytest.mark.parametrize("dtype", turned.NARROW)
def test_narrow_turned_layers_that_are_not_finite(dtype: torch.dtype) -> None:
    turned.check_not_finite("cpu", dtype)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0**14])
def test_batch_norm_of_narrow_turned_layers(training: bool, factor: float) -> None:
    turned.check_batch_norm(training, factor, "cpu", turned.NARROW[training])


@pytest.mark.parametrize("dtype", turned.NARROW)
@pytest.mark.parametrize("size", [(300, 200, 72), (65, 16, 64)], ids=str)
def test_logsumexp_of_turned_layers(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    turned.check_logsumexp(size, "cpu", dtype)


@pytest.mark.parametrize("dtype", turned.NARROW)
@pytest.mark.parametrize("offset", moments.OFFSETS)
@pytest.mark.parametrize("m", [300, 1100])
def test_moments_of_turned_layers(m: int, offset: float, dtype: torch.dtype) -> None:
    turned.check_moments(m, offset, "cpu", dtype)
