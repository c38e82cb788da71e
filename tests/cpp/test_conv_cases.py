"""The cases of the GPU tests of convolutions reach kernels: the library says so without a GPU."""

import re

import pytest

from pycutfuse import support
from pycutfuse.testing.forcing import Kind, conv_kinds_of

from ..cases.conv import HANDED_OVER, KERNEL, KINDS, ConvCase
from ..cases.direct import DIRECT
from .native import binding

_C = binding()


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is one."""
    monkeypatch.setattr(support, "device_props", lambda index: _C.DeviceProps())


every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@every_kind
@pytest.mark.parametrize("case", KERNEL + DIRECT, ids=str)
def test_kernels_take_the_cases_that_tests_want_fused(case: ConvCase, kind: Kind) -> None:
    assert support.conv_why_not(case.problem(kind)) is None
    support.make_conv_plan(case.problem(kind))


@every_kind
@pytest.mark.parametrize("tail", ["batch_norm_train", "batch_norm_eval"])
def test_kernels_take_them_with_batch_norm(tail: str, kind: Kind) -> None:
    for case in KERNEL:
        if not case.transposed:
            problem = case.problem(kind)._replace(tail=tail)
            assert support.conv_why_not(problem) is None, str(case)
            assert support.make_conv_plan(problem).policy.direct == 0 or tail == "batch_norm_eval"


@every_kind
@pytest.mark.parametrize("case", HANDED_OVER, ids=str)
def test_no_kernel_takes_the_cases_that_tests_want_handed_over(case: ConvCase, kind: Kind) -> None:
    reason = support.conv_why_not(case.problem(kind))
    assert reason is not None, "it belongs to KERNEL now"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        support.make_conv_plan(case.problem(kind))
    for policy in _C.compiled_conv_policies():
        with pytest.raises(NotImplementedError):
            support.make_conv_plan(case.problem(kind), policy)


@every_kind
@pytest.mark.parametrize("tail", ["batch_norm_train", "batch_norm_eval"])
def test_a_convolution_alone_can_have_the_policy_of_one_with_batch_norm(tail, kind: Kind) -> None:
    """As backward of it convolves again."""
    for case in KERNEL:
        alone = case.problem(kind)
        if case.transposed and case.stride != 1:
            assert "batch norm" in str(support.conv_why_not(alone._replace(tail=tail)))
        elif support.conv_why_not(alone) is None:
            policy = support.make_conv_plan(alone._replace(tail=tail)).policy
            assert support.make_conv_plan(alone, policy).policy == policy


def test_every_compiled_policy_takes_one_of_the_cases() -> None:
    policies = _C.compiled_conv_policies()
    assert policies
    for policy in policies:
        taken, refused = 0, []
        for case in DIRECT if policy.direct else KERNEL:
            for kind in conv_kinds_of(policy):
                if kind not in KINDS:
                    continue
                try:
                    support.make_conv_plan(case.problem(kind), policy)
                except NotImplementedError as error:
                    refused.append(f"{case}: {error}")
                else:
                    taken += 1
        assert taken > 0, (policy, refused)
