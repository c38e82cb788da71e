"""Binding of libcutfuse: numbers and pointers in, typed exceptions out. No logic lives here.

Every function that calls the library releases the GIL while it runs. Pointers are integers
(`tensor.data_ptr()`), 0 for null; strides are in elements. A failed Status becomes ValueError,
RuntimeError, TypeError, NotImplementedError or MemoryError by its code (include/cutfuse/status.h).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Address = int | Tensor | None

ABI_VERSION: int  # kAbiVersion this binding was compiled with

def abi_version() -> int: ...  # of the loaded library
def version() -> str: ...
def build_info() -> str: ...
def device_count() -> int: ...

OPS: dict[str, int]  # "gelu_tanh" -> code, from the Op enumeration
MAX_STEPS: int
TAILS: dict[str, int]  # "none", "batch_norm_train", "batch_norm_eval", "logsumexp"

class DeviceProps:
    """Properties of a GPU; may be constructed by hand to plan without one."""

    index: int
    major: int
    minor: int
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    driver_version: int
    name: str
    def __init__(
        self,
        *,
        index: int = 0,
        major: int = 9,
        minor: int = 0,
        sm_count: int = 132,
        shared_bytes: int = 232448,
        l2_bytes: int = 62914560,
        driver_version: int = 13000,
        name: str = "",
    ) -> None: ...

def query_device(index: int) -> DeviceProps: ...
def check_device(device: DeviceProps) -> str | None:
    """None if a kernel of this build runs there, else why not."""

class GemmPolicy:
    tile_m: int
    tile_n: int
    cluster_m: int
    promote_k: int  # K between promotions to the fp32 sum; 0: none, everywhere but at ieee
    raster: int  # 0 along M, 1 along N
    swizzle: int
    split_k: int
    arch: int  # 90: wgmma and TMA, 80: mma.sync and cp.async, 0 in a plan: no tensor cores
    element: int  # DType of what is multiplied: 1 float16 (planes or tensors), 2 bfloat16
    source: int  # of A: 0 a matrix, 3 the weight turned over; 1, 2 images, within a ConvPolicy
    trailing_blocks: int  # that split the last rows while the first tiles are multiplied
    def __init__(
        self,
        tile_m: int,
        tile_n: int,
        cluster_m: int = 1,
        promote_k: int = 64,
        raster: int = 0,
        swizzle: int = 1,
        split_k: int = 1,
        arch: int = 90,
        element: int = 1,
        source: int = 0,
        trailing_blocks: int = 0,
    ) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __repr__(self) -> str: ...

def compiled_policies() -> list[GemmPolicy]: ...
def select_policy(
    m: int, n: int, k: int, device: DeviceProps, precision: int = 0, dtype: int = 0
) -> GemmPolicy: ...

class Program:
    """What crosses the dispatcher, validated.

    codes: op, operand index or -1 for each step; constants: two for each step.
    """

    def __init__(self, codes: Sequence[int], constants: Sequence[float]) -> None: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __eq__(self, other: object) -> bool: ...
    def validate(self, operand_count: int) -> None: ...
    def canonicalise(self) -> Program: ...
    def run(self, value: float, operands: Sequence[float]) -> float: ...
    def vjp(
        self, value: float, operands: Sequence[float], grad: float
    ) -> tuple[float, list[float]]: ...

class FusedProblem:
    """One contraction with its programs and tail; immutable."""

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        program: Program,
        tail: int,
        after: Program,
        precision: int,  # of float32: 0 ieee, 1 tf32
        dtype: int,  # DType of x, weight and out: 0 float32, 1 float16, 2 bfloat16
        weight_planes: bool = False,
        x_leading: int = 0,  # elements between rows of a 16-bit x, a multiple of 8
        weight_leading: int = 0,
    ) -> None: ...

class Plan:
    workspace_bytes: int
    policy: GemmPolicy
    def describe(self) -> str: ...

class ChainPlan:
    workspace_bytes: int
    def describe(self) -> str: ...

def why_not(problem: FusedProblem, device: DeviceProps) -> str | None: ...
def why_slower(problem: FusedProblem, device: DeviceProps) -> str | None: ...
def why_not_chain(first: FusedProblem, second: FusedProblem, device: DeviceProps) -> str | None: ...
def make_plan(
    problem: FusedProblem, device: DeviceProps, policy: GemmPolicy | None = None
) -> Plan: ...
def make_chain(first: FusedProblem, second: FusedProblem, device: DeviceProps) -> ChainPlan: ...
def bind(
    plan: Plan,
    x_row_stride: int,
    x_col_stride: int,
    weight_row_stride: int,
    weight_col_stride: int,
    operands: Sequence[int],  # 0, row stride, column stride, DType of each operand, flat
    after_operands: Sequence[int],
    out_row_stride: int,  # not read after logsumexp, whose result is [M]
    affine_dtype: int = 0,  # DType of the batch norm's weight and bias
    running_dtype: int = 0,  # of its running statistics
) -> Launch: ...

class Launch(Protocol):
    """One plan with all that stays the same from call to call.

    An address is a number, None for null, or a tensor, whose data_ptr() is asked.
    """

    def __call__(
        self,
        out: Address,
        save: Address,  # float32 [2][N], mean and 1 / std of the batch; read by batch_norm_train
        workspace: Address,
        weight_words: Address,
        momentum: float,  # negative: None
        eps: float,
        promotion: float,  # 1 + 2**-23; 1 in integer-exact tests
        stream: int,
        tensors: Sequence[Address],
        # x, weight, weight planes, the operands, with a batch norm its weight, bias, running_mean,
        # running_var and num_batches_tracked, the operands after it
        /,
    ) -> None:
        """Makes the plan's device current for the duration of the call."""

def replay(parts: tuple[object, ...]) -> Callable[[object, object], Tensor | None]:
    """A call of a module that is made again: pycutfuse/ops/_replay.py says of which parts.

    It is given the module and its argument, and returns None if anything is not as it was.
    """

def run_chain(
    plan: ChainPlan,
    dtype: int,
    x: int,
    x_row_stride: int,
    x_col_stride: int,
    first_weight: Sequence[int],  # pointer, row stride, column stride, planes, words
    second_weight: Sequence[int],
    first_operands: Sequence[int],
    second_operands: Sequence[int],
    out: int,
    out_row_stride: int,
    workspace: int,
    promotion: float,
    stream: int,
) -> None:
    """Makes the plan's device current for the duration of the call."""

def planes_layout(rows: int, k: int, count: int) -> tuple[int, int, int]:
    """(leading dimension, bytes of all `count` planes, bytes of the row words)."""

def split(
    x: int,
    row_stride: int,
    col_stride: int,
    rows: int,
    k: int,
    count: int,  # of planes
    planes: int,
    words: int,
    device: DeviceProps,
    stream: int,
) -> None: ...

class LogSumExpPlan:
    workspace_bytes: int
    rows: int  # elements of the result
    length: int  # elements of x for each of them
    splits: int  # parts of a row; more than 1: partials and a merge
    def __repr__(self) -> str: ...

def plan_logsumexp(
    sizes: Sequence[int],
    strides: Sequence[int],
    reduced: int,  # bit d: dimension d is reduced
    dtype: int,  # DType: 0 float32, 1 float16, 2 bfloat16
    out_dtype: int,
    device: DeviceProps,
) -> LogSumExpPlan: ...
def logsumexp(plan: LogSumExpPlan, x: int, out: int, workspace: int, stream: int) -> None:
    """Makes the plan's device current for the duration of the call."""

def merge_logsumexp_partials(
    partials: int,  # fp32 [rows][count][2]: max, sum of exp(value - max)
    rows: int,
    count: int,
    out: int,
    out_dtype: int,
    device: DeviceProps,
    stream: int,
) -> None: ...

class ConvPolicy:
    """How a convolution is computed; its repr is code that can be pasted back."""

    tile_n: int  # pixels of one tensor-core instruction; 0: see `gemm` and `direct`
    planes: int  # fp16 planes of x and of the weight: 2 at ieee
    element: int  # DType of the planes, or of the tensors: 1 float16, 2 bfloat16
    m_blocks: int  # of 64 output channels at once
    strip: int  # output columns of a strip of the image; 0: whole rows
    chunk: int  # input channels, with their phases, in shared memory at once
    stages: int
    gemm: GemmPolicy  # of a matrix product
    direct: int  # fp32 without tensor cores: 1 what suits, 2 any filter, 3, 5, 7: its size; 0: no
    patch_n: int  # output channels at once, by patches; then gemm.source is 2; 0: no
    def __init__(
        self,
        tile_n: int,
        planes: int = 1,
        element: int = 1,
        m_blocks: int = 1,
        strip: int = 0,
        chunk: int = 0,
        stages: int = 2,
        gemm: GemmPolicy = ...,  # the one that is selected
        direct: int = 0,
        patch_n: int = 0,
    ) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __repr__(self) -> str: ...

def compiled_conv_policies() -> list[ConvPolicy]: ...

class ConvProblem:
    """One convolution with its programs and tail; immutable. Names as torch's arguments."""

    def __init__(
        self,
        batch: int,
        channels: int,
        height: int,
        width: int,
        out_channels: int,
        kernel_h: int,
        kernel_w: int,
        stride_h: int,
        stride_w: int,
        pad_h: int,  # above; below follows from out_h
        pad_w: int,  # left
        dilation_h: int,
        dilation_w: int,
        groups: int,
        out_h: int,
        out_w: int,
        transposed: bool,
        program: Program,
        tail: int,
        after: Program,
        precision: int,  # of float32: 0 ieee, 1 tf32
        dtype: int,  # DType of x, weight and out
        packed_weight: bool = False,
        channels_last: bool = False,  # of out
        pixel_stride: int = 0,  # of x, if pixels may be multiplied as a matrix
    ) -> None: ...

class ConvPlan:
    workspace_bytes: int
    packed_bytes: int
    packed_key: str  # plans of equal keys read the same packed weight
    policy: ConvPolicy
    def describe(self) -> str: ...

def conv_why_not(problem: ConvProblem, device: DeviceProps) -> str | None: ...
def conv_why_slower(problem: ConvProblem, device: DeviceProps) -> str | None: ...
def make_conv_plan(
    problem: ConvProblem, device: DeviceProps, policy: ConvPolicy | None = None
) -> ConvPlan: ...
def pack_conv_weight(
    plan: ConvPlan,
    weight: int,
    weight_strides: Sequence[int],
    packed: int,  # packed_bytes, 256-byte aligned
    stream: int,
) -> None: ...
def run_conv(
    plan: ConvPlan,
    x: int,
    x_strides: Sequence[int],  # of (N, C, H, W)
    weight: int,
    weight_strides: Sequence[int],
    packed: int,
    operands: Sequence[int],  # pointer, channel stride, pixel stride, DType of each operand, flat
    after_operands: Sequence[int],
    out: int,
    batch_norm: Sequence[int] | None,  # as in run
    momentum: float,
    eps: float,
    workspace: int,
    promotion: float,
    stream: int,
) -> None:
    """Makes the plan's device current for the duration of the call."""
