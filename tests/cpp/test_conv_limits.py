"""Sizes beyond what kernels count in 32 bits are handed over, and nonsense is named as such."""

import re
import time
from typing import Any

import pytest

from .native import binding
from .test_conv_plan import H200, problem

_C = binding()

CONV = (1, 16, 8, 64, 16, 3, 1, 0, 1, 1, False)
TRANSPOSED = (1, 16, 1, 64, 16, 3, 1, 0, 1, 1, True)
FLAT = {"kernel_h": 1, "kernel_w": 8}


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        (TRANSPOSED, {"stride_h": 1 << 32}, "stride_h is 4294967296"),
        (TRANSPOSED, {"stride_h": 1 << 30, "stride_w": 1 << 30}, "stride_h is 1073741824"),
        (TRANSPOSED, {"stride_h": 1 << 16, "stride_w": 1 << 16}, "of stride 65536x65536"),
        (CONV, {"kernel_h": 2, "dilation_h": 1 << 62, "pad_h": 1 << 61}, "pad_h is"),
        (CONV, {"dilation_h": (1 << 32) + 1}, "dilation_h is 4294967297"),
        (CONV, {"pad_h": 1 << 62}, "pad_h is"),
        (CONV, {"pad_h": (1 << 32) + 1, "out_h": 64}, "pad_h is 4294967297"),
        (CONV, {"height": 0, "width": 1 << 32}, "width is 4294967296"),
        (
            CONV,
            {**FLAT, "pad_h": 1 << 29, "stride_h": 16, "out_h": (1 << 26) + 1, "out_w": 1},
            "results span 2^30 pixels",
        ),
        (
            (1, 16, 32767, 1, 16, 1, 1, 0, 1, 1, False),
            {**FLAT, "pad_h": 200_000_000, "pad_w": 4, "out_h": 400_032_767, "out_w": 2},
            "400032767 rows of 10 pixels",
        ),
    ],
    ids=str,
)
def test_sizes_of_more_than_30_bits_are_handed_over(
    shape: tuple[Any, ...], changes: dict[str, int], words: str
) -> None:
    assert words in _C.conv_why_not(problem(shape, **changes), H200)


def test_a_depthwise_weight_is_not_counted_as_a_full_one() -> None:
    """Its elements are fewer by the number of groups."""
    many = (1 << 30) - 2
    sizes = (1, many, 1, 1, many, 3, 1, 1, 1)
    depthwise = problem((*sizes, many, False))
    assert _C.conv_why_not(depthwise, H200) is None
    assert _C.make_conv_plan(depthwise, H200).policy.direct == 3
    with pytest.raises(RuntimeError, match="too many elements"):
        _C.conv_why_not(problem((*sizes, 1, False)), H200)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": (1 << 30) - 1, "out_h": 4}, "2^30 tiles and more"),
        (
            {"out_channels": 1 << 28, "channels": 1 << 28, "groups": 1 << 28, "out_h": 2},
            "rows of weights",
        ),
    ],
)
def test_tiles_and_rows_of_weights_have_32_bit_numbers(changes: dict[str, int], words: str) -> None:
    policy = _C.ConvPolicy(128, 1, 1, 1, 0, 0, 2)
    shape = (1, 1, 64, 80, 1, 3, 1, 1, 1, 1, False)
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        _C.make_conv_plan(problem(shape, **changes), H200, policy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("m_blocks", value) for value in (0, 3, 4, -1)),
        *(("stages", value) for value in (-1, 0, 1, 5, 6)),
        *(("chunk", value) for value in (-16, 4)),
        *(("strip", value) for value in (-8, 4, (1 << 31) - 8)),
    ],
)
def test_policies_that_no_kernel_can_run_are_refused(name: str, value: int) -> None:
    policy = _C.ConvPolicy(128, 1, 1, 1, 0, 0, 2)
    setattr(policy, name, value)
    with pytest.raises(NotImplementedError, match=name):
        _C.make_conv_plan(problem(CONV), H200, policy)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 6144, 200, 200, 64, 2, 1, 0, 63, 1, False), "bytes of shared memory are too few"),
        ((1, 16383, 100, 100, 64, 40, 1, 0, 1, 1, False), "sums of 26212800 terms"),
    ],
)
def test_what_is_too_large_is_refused_in_no_time(shape: tuple[Any, ...], words: str) -> None:
    """Listing all its steps, for every policy, took 7 and 2.5 s. Only an implicit GEMM has it."""
    start = time.process_time()
    assert _C.make_conv_plan(problem(shape), H200).policy.gemm.source == 1
    batch, channels, height, width, features, *settings = shape
    groups = (batch, 2 * channels, height, width, 2 * features, *settings[:-2], 2, False)
    assert _C.conv_why_not(problem(groups), H200) is not None
    assert _C.conv_why_slower(problem(groups), H200) is None
    assert time.process_time() - start < 1.0
    with pytest.raises(NotImplementedError, match=words):
        _C.make_conv_plan(problem(shape), H200, _C.ConvPolicy(128))


def test_a_chunk_without_taps_is_named() -> None:
    """The middle one of three phases has none."""
    sparse = problem((1, 16, 64, 64, 16, 2, 3, 0, 2, 1, False))
    assert _C.conv_why_not(sparse, H200) is None
    with pytest.raises(NotImplementedError, match="a chunk of 16 channels has no tap"):
        _C.make_conv_plan(sparse, H200, _C.ConvPolicy(128, chunk=16))


@pytest.mark.parametrize("out", [40, 60])
def test_planes_of_another_size_are_no_product_of_planes(out: int) -> None:
    nchw = _C.ConvPolicy(0, gemm=_C.GemmPolicy(0, 0, source=2))
    shape = (32, 256, 56, 56, 256, 1, 1, 0, 1, 1, False)
    _C.make_conv_plan(problem(shape, pixel_stride=1), H200, nchw)
    with pytest.raises(NotImplementedError, match="no product"):
        _C.make_conv_plan(problem(shape, pixel_stride=1, out_h=out, out_w=out), H200, nchw)
