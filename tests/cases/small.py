"""Products without tensor cores: what is drawn, run on a device and compared with float64."""

import torch
from torch import Tensor

import pycutfuse as pcf
from pycutfuse.testing import forced_policy, generate, guarded, integers, strided
from pycutfuse.testing.forcing import Kind

INF, NAN = float("inf"), float("nan")
# (M, N, K): parts of tiles, of pairs and of vectors; several tiles along both; several steps.
SIZES = [(1, 1, 1), (5, 7, 3), (64, 64, 16), (130, 70, 33), (33, 65, 130), (97, 8, 256)]
SIZES += [(200, 9, 507), (9, 200, 127), (257, 130, 300), (70, 66, 64)]
DEEP = [(40, 33, 1030), (3, 129, 4095), (33, 30, 9001)]


def reaches(policy: object, k: int) -> bool:
    """Whether the policy's sums of `k` products are promised to be exact enough."""
    if policy.arch == 0:  # type: ignore[attr-defined]
        return True
    blocks = policy.cluster_m  # type: ignore[attr-defined]
    parts = policy.split_k  # type: ignore[attr-defined]
    return bool(k <= ({1: 128, 2: 512, 4: 4096}[parts] if blocks == 1 else 3072 * blocks))


def drawn(kind: Kind, size: tuple[int, int, int], device: str, layout: str) -> list[Tensor]:
    """x and weight in a layout, a bias, a vector per row and a tensor of the result's shape."""
    m, n, k = size
    shapes = [(m, k), (n, k), (n,), (m, 1), (m, n)]
    made = [integers(s, seed=i, device=device).to(kind[0]) for i, s in enumerate(shapes)]
    return [*(strided(one, layout) for one in made[:2]), *made[2:]]


def check_whole_numbers(
    policy: object, kind: Kind, size: tuple[int, int, int], device: str, layout: str = "contiguous"
) -> None:
    """Sums are exact, and a program meets every kind of operand at its place."""
    x, weight, bias, row, full = drawn(kind, size, device, layout)
    steps = (pcf.mul(row), pcf.add(full), pcf.sub(2.0), pcf.leaky_relu(0.5))
    with forced_policy(policy), guarded():  # type: ignore[arg-type]
        plain = pcf.ops.linear(x, weight, precision=kind[1])
        result = pcf.ops.linear(x, weight, bias, epilogue=steps, precision=kind[1])
    sums = x.double() @ weight.double().T
    assert torch.equal(plain, sums.to(kind[0]))
    value = (sums + bias.double()) * row.double() + full.double() - 2
    assert torch.equal(result, torch.where(value > 0, value, 0.5 * value).to(kind[0]))


def check_alignments(policy: object, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Rows that begin at every multiple of an element, and end at others; odd results, too."""
    for offset in range(4):
        for n, k in ((30, 60), (31, 60), (12, 57)):
            x = integers((50, k + 4), seed=1, device=device).to(dtype)[:, offset : offset + k]
            weight = integers((n, k + 5), seed=2, device=device).to(dtype)[:, offset : offset + k]
            with forced_policy(policy), guarded():  # type: ignore[arg-type]
                result = pcf.ops.linear(x, weight, precision="ieee")
            assert torch.equal(result, (x.double() @ weight.double().T).to(dtype))


def check_not_finite(policy: object, device: str) -> None:
    """What is not finite stays where it is."""
    m, n, k = 70, 67, 45
    x, weight = (generate("rand", s, seed=i, device=device) for i, s in enumerate([(m, k), (n, k)]))
    x[1, 7], x[69, 44], x[3, 0] = INF, NAN, -INF
    weight[4, 0], weight[66, 41] = -INF, INF
    with forced_policy(policy), guarded():  # type: ignore[arg-type]
        found = pcf.ops.linear(x, weight, precision="ieee")
        again = pcf.ops.linear(x, weight, precision="ieee")
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), wanted, equal_nan=True, rtol=1e-5, atol=0.0)
    assert torch.equal(found.view(torch.int32), again.view(torch.int32))
