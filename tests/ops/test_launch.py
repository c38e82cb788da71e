"""What crosses the border to the library: strides, addresses, plans made once, decisions kept."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycutfuse as pcf
from pycutfuse import config
from pycutfuse.ops import _launch, _layout
from pycutfuse.ops import _linear as linear_module
from pycutfuse.ops import _linear_batch_norm_raw as raw
from pycutfuse.program import encode, operands_of
from pycutfuse.testing import LAYOUTS, exact_promotion, guarded, strided

from ..cases.programs import PROGRAMS, ProgramCase
from ..cases.sizes import SMALL, SizeCase
from .simulated import Binding, install


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    yield install(monkeypatch)
    _launch.clear_caches()


def call(x: Tensor, weight: Tensor, program=(), precision: str = "ieee") -> Tensor:
    encoded = encode(program)
    head = (x, weight, None, None, list(encoded.codes), list(encoded.constants))
    return linear_module._forward_cuda(*head, operands_of(program), precision)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", SMALL, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_addresses(size: SizeCase, layout: str, binding: Binding) -> None:
    x = strided(draw(size.m, size.k), layout)
    weight, vector = strided(draw(size.n, size.k), layout), draw(size.n)
    full = strided(draw(size.m, size.n), layout)
    for _ in range(2):
        with guarded():
            result = call(x, weight, (pcf.add(vector), pcf.mul(full)))
        torch.testing.assert_close(result, F.linear(x, weight, vector) * full)
    assert (binding.planned, binding.launched) == (1, 2)
    assert binding.last["stream"] == 77
    assert binding.last["promotion"] == 1 + 2**-23


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_program(program: ProgramCase, binding: Binding) -> None:
    x, weight, operands = draw(6, 5), draw(4, 5), program.operands(6, 4)
    result = call(x, weight, program.build(operands))
    torch.testing.assert_close(result, program.plain(F.linear(x, weight), operands))
    assert binding.launched == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.permute(1, 0, 2),
        lambda x: x[:, :1].expand(-1, 5, -1),
        lambda x: x[:, 1:3],
        lambda x: x[1],
        lambda x: x[:, :1],
        lambda x: x[..., ::2],
        lambda x: x.transpose(1, 2),
        lambda x: x[1, 2],
    ],
)
def test_views_of_more_dimensions(make, binding: Binding) -> None:
    x = make(draw(3, 4, 6))
    weight = draw(7, x.shape[-1])
    operands = [draw(7), draw(*x.shape[:-1], 1), draw(*x.shape[1:-1], 7), draw(1)]
    for operand in operands:
        result = call(x, weight, (pcf.mul(operand),))
        torch.testing.assert_close(result, F.linear(x, weight) * operand)


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 5, 6), (4, 1, 6), (4, 5, 1), (1, 1, 1), (6,)])
def test_collapsed_views_read_the_same_elements(shape) -> None:
    for source in (torch.arange(4 * 5 * 6 * 2).view(4, 5, 6, 2)[..., 0],):
        tensor = (
            source[tuple(slice(0, size) for size in shape)] if len(shape) == 3 else source[0, 0]
        )
        for view in (tensor, tensor.transpose(0, -1)):
            found = _layout.collapse(view.shape, view.stride())
            if found is None:
                assert view.dim() == 3
                continue
            rows = view.numel() // view.shape[-1]
            matrix = view.as_strided((rows, view.shape[-1]), found, view.storage_offset())
            assert torch.equal(matrix, view.reshape(rows, view.shape[-1]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, -1.0])
def test_batch_norm_addresses(training: bool, momentum: float, binding: Binding) -> None:
    x, weight, scale = draw(9, 5), draw(4, 5), draw(4)
    gamma, beta, mean, var = draw(4), draw(4), torch.zeros(4), torch.ones(4)
    count = torch.tensor(2)
    twin = torch.nn.BatchNorm1d(4, momentum=None if momentum < 0 else momentum).train(training)
    with torch.no_grad():
        twin.weight.copy_(gamma)
        twin.bias.copy_(beta)
    twin.num_batches_tracked.fill_(2)
    inner, after = encode((pcf.mul(scale),)), encode((pcf.relu(),))
    stats = (gamma, beta, mean, var, count)
    given = raw.Call(
        *(x, weight, None, None, inner, [scale], *stats, training, momentum, 1e-5, after, []),
        "ieee",
    )
    for step in range(2):
        with guarded():
            if step == 0:
                out, save = raw._forward_cuda(*raw.flat(given))
            else:  # nobody asks for the statistics of the batch
                recipe = raw.find(_launch.cached, given, "ieee")
                assert isinstance(recipe, _launch.Recipe)
                out = raw.launch(recipe, given, None)
        z = F.linear(x, weight) * scale
        torch.testing.assert_close(out, twin(z).relu())
    torch.testing.assert_close((mean, var), (twin.running_mean, twin.running_var))
    assert int(count) == int(twin.num_batches_tracked)
    if training:
        torch.testing.assert_close(save[0], z.mean(0))
        torch.testing.assert_close(save[1], (z.var(0, unbiased=False) + 1e-5).rsqrt())


def test_a_plan_serves_all_strides_and_a_recipe_all_calls(binding: Binding) -> None:
    weight = draw(4, 5)
    for x in (draw(6, 5), draw(5, 6).t(), draw(6, 5), draw(2, 3, 5)):
        call(x, weight)
    assert binding.planned == 1
    assert len(_launch._recipes) == 3
    call(draw(7, 5), weight)
    assert binding.planned == 2


def test_caches_stay_bounded(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "MAX_RECIPES", 4)
    weight = draw(4, 5)
    for rows in range(1, 20):
        torch.testing.assert_close(call(draw(rows, 5), weight), F.linear(draw(rows, 5), weight))
    assert len(_launch._recipes) <= 4
    assert len(_launch._plans) <= 4


def test_what_no_kernel_takes_is_handed_over(binding: Binding) -> None:
    config.set_fallback_policy("error")
    x, weight = draw(2, 4001), draw(3, 4001)
    torch.testing.assert_close(call(x, weight), F.linear(x, weight))
    assert config.counters()["handover"] == {"linear: K is over the limit of 4000": 1}
    assert binding.launched == 0


def test_other_dtypes_are_refused_as_fallbacks(binding: Binding) -> None:
    x, weight = draw(2, 5).double(), draw(3, 5).double()
    torch.testing.assert_close(call(x, weight), F.linear(x, weight))
    assert config.counters()["fallback"] == {"linear: dtype float64": 1}


def test_a_tensor_changed_through_data_is_seen(binding: Binding) -> None:
    x, weight = draw(2, 5), torch.nn.Parameter(draw(3, 5))
    call(x, weight)
    weight.data = draw(5, 3).t()
    torch.testing.assert_close(call(x, weight), F.linear(x, weight))
    weight.data = draw(3, 5).double()
    with pytest.raises(RuntimeError, match="float64"):
        call(x, weight)


@pytest.mark.parametrize("frozen", [(3, 20), (16, 8), (8, 32), (32, 8)])
@pytest.mark.parametrize("count", [1, 2])
def test_stale_planes_are_refused(frozen: tuple[int, int], count: int, binding: Binding) -> None:
    """Those of a weight of another shape, though they may take as many bytes."""
    rows, k = frozen
    planes = torch.zeros(count, rows, 2 * binding.planes_layout(rows, k, count)[0]).byte()
    head = (draw(2, 16), draw(8, 16), planes, torch.zeros(rows, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="unfreeze"):
        linear_module._forward_cuda(*head, [], [], [], "ieee")


def test_the_promotion_factor_can_be_exact(binding: Binding) -> None:
    with exact_promotion():
        call(draw(2, 5), draw(3, 5))
    assert binding.last["promotion"] == 1.0


def test_the_workspace_is_aligned_for_the_statistics(binding: Binding) -> None:
    call(draw(2, 5), draw(3, 5))
    (recipe,) = _launch._recipes.values()
    assert recipe.workspace_bytes == 1008
