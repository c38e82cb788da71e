"""Forced policies and the promotion factor, for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pycutfuse._knobs import knobs
from pycutfuse._loader import native
from pycutfuse.ops import _launch

if TYPE_CHECKING:
    from pycutfuse._C import ConvPolicy, GemmPolicy


Kind = tuple[torch.dtype, str]

TURNED = 3  # GemmPolicy.source of layers that are turned over

# Dtype and tier of every kind of call that kernels run.
KINDS: tuple[Kind, ...] = (
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.float16, "ieee"),
    (torch.bfloat16, "ieee"),
)


def turned_policy(raster: int = 1, dtype: torch.dtype = torch.float32) -> "GemmPolicy":
    """That of layers that are turned over, which ``_C.compiled_policies()`` leaves out.

    It takes fp32 at tf32, or 16 bits, with a program of affine steps and bounds alone, or in 16
    bits a sigmoid; and logsumexp in 16 bits.
    """
    binding = native().binding
    assert binding is not None
    element = (torch.float32, torch.float16, torch.bfloat16).index(dtype)
    policy: GemmPolicy = binding.GemmPolicy(128, 256, 2, 0, raster, element=element, source=TURNED)
    return policy


def small_policies() -> "list[GemmPolicy]":
    """Those of products without tensor cores, which ``_C.compiled_policies()`` leaves out.

    They take every dtype and tier with a program and no tail: in one launch, by tiles and one, two
    or four parts of K up to 128, 512 or 4096, or by four of each of 2, 4 or 8 blocks up to 3072
    times those; and one of few rows or columns in two parts of K.
    """
    binding = native().binding
    assert binding is not None
    tiles = ((64, 64, 1), (32, 32, 2), (32, 32, 4), (64, 8, 4), (8, 64, 4))
    made = [
        binding.GemmPolicy(m, n, blocks, 0, 0, split_k=parts, arch=1)
        for blocks in (1, 2, 4, 8)
        for m, n, parts in tiles
        if blocks == 1 or parts == 4
    ]
    return [*made, binding.GemmPolicy(0, 0, 1, 0, 0, split_k=2, arch=0)]


def kinds_of(policy: "GemmPolicy | None") -> tuple[Kind, ...]:
    """Dtype and tier of the calls that `policy` may be forced on; all of them for None.

    Examples
    --------
    >>> len(kinds_of(None))
    4
    """
    if policy is None or policy.arch < 80:
        return KINDS
    if policy.promote_k:
        return KINDS[:1]
    if policy.source == TURNED:
        return KINDS[policy.element + 1 : policy.element + 2]
    return KINDS[3:] if policy.element == 2 else KINDS[1:3]


def conv_kinds_of(policy: "ConvPolicy | None") -> tuple[Kind, ...]:
    """As `kinds_of`, of a policy of convolutions."""
    if policy is None:
        return KINDS
    if policy.tile_n == 0:
        if policy.patch_n:
            return KINDS[:1] if policy.planes == 2 else KINDS[1:2]
        if policy.gemm.source == 2 and policy.gemm.tile_m == 0:  # planes as they are
            return KINDS[:2]
        if policy.gemm.source == 2:
            return KINDS[:1] if policy.gemm.promote_k else KINDS[1:2]
        selects = policy.gemm.tile_m == 0  # one for each kind
        return KINDS if selects else kinds_of(policy.gemm)
    return KINDS[:1] if policy.planes == 2 else KINDS[1:]


@contextmanager
def forced_policy(policy: "GemmPolicy | None") -> Iterator[None]:
    """Launch with `policy`, one of ``_C.compiled_policies()``, whatever the problem's size.

    A call whose dtype and tier are not among `kinds_of` it raises NotImplementedError. Chains of
    two contractions keep their own policies.
    """
    outer = knobs.policy
    _launch.clear_caches()
    knobs.policy = policy
    try:
        yield
    finally:
        knobs.policy = outer
        _launch.clear_caches()


@contextmanager
def forced_conv_policy(policy: "ConvPolicy | None") -> Iterator[None]:
    """Launch convolutions with `policy`, one of ``_C.compiled_conv_policies()``.

    Or with one that names a mechanism alone: ``_C.ConvPolicy(0)`` multiplies pixels as they lie,
    with ``gemm=_C.GemmPolicy(0, 0, source=1)`` gathers them, and with ``source=2`` those of NCHW as
    they lie; each selects the rest. One with a ``patch_n`` reads patches of NCHW. What is not
    selected without being forced is launched, too.

    A call that it does not compute raises NotImplementedError. It is to be forced only on calls of
    a dtype and tier among `conv_kinds_of` it: on others it may not keep the tier's promise.
    """
    outer = knobs.conv_policy
    _launch.clear_caches()
    knobs.conv_policy = policy
    try:
        yield
    finally:
        knobs.conv_policy = outer
        _launch.clear_caches()


@contextmanager
def slow_problems_taken() -> Iterator[None]:
    """Launch kernels also where PyTorch is expected to be faster: tests are small."""
    outer = knobs.take_slow
    _launch.clear_caches()
    knobs.take_slow = True
    try:
        yield
    finally:
        knobs.take_slow = outer
        _launch.clear_caches()


@contextmanager
def exact_promotion() -> Iterator[None]:
    """Add partial sums without the factor that takes back truncation: exact sums stay exact.

    Examples
    --------
    >>> with exact_promotion():
    ...     knobs.promotion
    1.0
    """
    outer = knobs.promotion
    knobs.promotion = 1.0
    try:
        yield
    finally:
        knobs.promotion = outer
