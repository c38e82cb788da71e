"""Kernels write all of their output, nothing else, and read nothing that they should not."""

import pytest
import torch
import torch.nn.functional as F

import pycutfuse as pcf
from pycutfuse.testing import LAYOUTS, GuardError, Guards, generate, guarded, strided
from pycutfuse.testing.forcing import KINDS, Kind

from ..cases.sizes import KERNEL, SizeCase


def test_a_write_outside_is_found() -> None:
    for offset in (-1, 12):
        guards = Guards()
        inner = guards.empty(3, dtype=torch.float32, device="cpu")
        guards.check()
        arena, _ = guards.arenas[0]
        arena[inner.storage_offset() * 4 + offset] = 0
        with pytest.raises(GuardError, match="1 bytes"):
            guards.check()


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_guarded_memory_is_poisoned(shape, dtype: torch.dtype) -> None:
    with guarded() as guards:
        made = guards.empty(*shape, dtype=dtype, device="cpu")
        assert made.shape == shape
        assert bool((made.isnan() if dtype.is_floating_point else made == 255).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equal_and_gapped_with_nan(layout: str) -> None:
    tensor = torch.randn(4, 5)
    made = strided(tensor, layout)
    assert torch.equal(made, tensor)
    if layout == "gapped":
        assert not made.is_contiguous()
        storage = torch.empty(0).set_(made.untyped_storage())
        assert int(storage.isnan().sum()) == storage.numel() - tensor.numel()


# Relative and absolute, of sums of up to 8200 products.
CLOSE = {
    (torch.float32, "ieee"): 1e-4,
    (torch.float32, "tf32"): 3e-1,
    (torch.float16, "ieee"): 1e-2,
    (torch.bfloat16, "ieee"): 5e-2,
}


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", KERNEL, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_keeps_to_its_memory(
    kind: Kind, size: SizeCase, layout: str, cuda: torch.device, fused: None
) -> None:
    x = generate("randn", (size.m, size.k), seed=1, device=cuda).to(kind[0])
    weight = generate("randn", (size.n, size.k), seed=2, device=cuda).to(kind[0])
    vector = generate("randn", (size.n,), seed=3, device=cuda).to(kind[0])
    full = generate("randn", (size.m, size.n), seed=4, device=cuda).to(kind[0])
    x, weight, full = (strided(tensor, layout) for tensor in (x, weight, full))
    steps = (pcf.tanh(), pcf.add(full))
    with guarded():
        result = pcf.ops.linear(x, weight, vector, epilogue=steps, precision=kind[1])
    expected = torch.tanh(F.linear(x.double(), weight.double(), vector.double())) + full
    torch.testing.assert_close(result.double(), expected, rtol=CLOSE[kind], atol=CLOSE[kind])


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [case for case in KERNEL if case.m > 1], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_to_its_memory(
    kind: Kind, size: SizeCase, training: bool, cuda: torch.device, fused: None
) -> None:
    options = {"device": cuda, "dtype": kind[0], "precision": kind[1]}
    layer = pcf.nn.LinearScaleBatchNorm1d(size.k, size.n, (size.n,), **options)
    layer.train(training)
    x = generate("rand", (size.m, size.k), seed=1, device=cuda).to(kind[0])
    z = F.linear(x.double(), layer.gemm.weight.double(), layer.gemm.bias.double())
    z = z * layer.scale.double()
    mean, var = (None, None) if training else (torch.zeros_like(z[0]), torch.ones_like(z[0]))
    expected = F.batch_norm(z, mean, var, training=training)
    with torch.no_grad(), guarded():
        result = layer(x)
    error = float((result.double() - expected).norm() / expected.norm())
    assert error < dict(zip(KINDS, (1e-3, 1e-2, 2e-2, 1e-1), strict=True))[kind]
    assert bool(result.isfinite().all())
