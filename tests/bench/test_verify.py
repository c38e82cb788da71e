"""`verify FILE` passes a faithful ModelNew and fails every kind of unfaithful one."""

import io
from pathlib import Path

import pytest

from pycutfuse.bench.verify import verify_file

PROBLEMS = Path(__file__).parents[2] / "benchmarks" / "problems"

FILE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.gemm = nn.Linear(k, n)
        self.scale = nn.Parameter(torch.randn(n))
        self.bn = nn.BatchNorm1d(n)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


class ModelNew(Model):
    {new}


def get_inputs():
    return [torch.rand(64, 48)]


def get_init_inputs():
    return [48, 40]
"""

FORWARD = "def forward(self, x):\n        "
CONSTRUCT = "def __init__(self, k, n):\n        super().__init__(k, n)\n        "


def _verify(tmp_path, new, inputs="torch.rand(64, 48)", **options):
    path = tmp_path / "problem.py"
    path.write_text(FILE.replace("{new}", new).replace("torch.rand(64, 48)", inputs))
    out = io.StringIO()
    result = verify_file(path, device="cpu", out=out, **options)
    return result, out.getvalue()


def test_an_equal_model_passes_in_both_modes_on_all_data(tmp_path):
    result, text = _verify(tmp_path, "pass")
    assert result.passed
    assert text.splitlines()[-1].startswith("PASSED")
    named = "\n".join(check.what for check in result.checks)
    for data in ("get_inputs()", "rand", "randn", "lognormal"):
        assert f"train, {data}: output" in named
        assert f"train, {data}: bn.running_var" in named
        assert f"eval, {data}: output" in named


@pytest.mark.parametrize(
    "new",
    [
        FORWARD + "return super().forward(x) * 1.00001",
        FORWARD + "return super().forward(x).half().float()",
        FORWARD + "return super().forward(x)[:, :39]",
        FORWARD + "return super().forward(x).double()",
        FORWARD + "return [super().forward(x), x]",
        FORWARD + "return super().forward(x.half().float())",
        FORWARD + "y = super().forward(x)\n        return y if self.training else y + 1e-4",
        FORWARD + "y = super().forward(x)\n        return y + 1e-4 if self.training else y",
        FORWARD + "raise RuntimeError('no kernel image')",
        FORWARD + "raise SystemExit(0)",
    ],
    ids=[
        "scaled",
        "half precision",
        "shape",
        "dtype",
        "two outputs",
        "tf32-like input",
        "eval only",
        "train only",
        "raises",
        "exits",
    ],
)
def test_a_wrong_forward_fails(tmp_path, new):
    result, text = _verify(tmp_path, new)
    assert not result.faults
    assert not result.passed
    assert text.splitlines()[-1].startswith("FAILED")


def test_an_output_that_is_not_wholly_written_fails(tmp_path):
    new = (
        FORWARD
        + "y = super().forward(x)\n        out = torch.empty_like(y)\n"
        + "        out[:-1] = y[:-1]\n        return out"
    )
    result, _ = _verify(tmp_path, new)
    assert not result.passed


@pytest.mark.parametrize(
    ("after", "buffer"),
    [
        ("self.bn.running_var.mul_(1.001)", "bn.running_var"),
        ("self.bn.running_mean.add_(1e-4)", "bn.running_mean"),
        ("self.bn.num_batches_tracked.add_(1)", "bn.num_batches_tracked"),
    ],
)
def test_wrong_running_statistics_fail(tmp_path, after, buffer):
    new = FORWARD + f"y = super().forward(x)\n        {after}\n        return y"
    result, _ = _verify(tmp_path, new)
    failed = [check.what for check in result.checks if not check.passed]
    assert failed
    assert any(what.endswith(buffer) and what.startswith("train") for what in failed)


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        (CONSTRUCT + "self.extra = nn.Parameter(torch.zeros(1))", "has extra"),
        (CONSTRUCT + "del self.scale", "lacks scale"),
        (CONSTRUCT + "self.scale = nn.Parameter(torch.ones(n))", "scale differs"),
        (CONSTRUCT + "self.scale = nn.Parameter(torch.randn(n, 1))", "(40, 1)"),
        (
            CONSTRUCT + "s = self.scale.data\n        del self.scale\n"
            "        self.register_buffer('scale', s)",
            "scale is a parameter in only one",
        ),
        ("def __init__(self, k):\n        pass", "ModelNew raised TypeError"),
        ("def __init__(self, *sizes):\n        raise SystemExit(0)", "ModelNew raised SystemExit"),
    ],
)
def test_a_different_structure_or_start_is_named(tmp_path, new, fault):
    result, text = _verify(tmp_path, new)
    assert not result.passed
    assert any(fault in found for found in result.faults), result.faults
    assert fault in text


def test_zero_and_minus_zero_are_not_the_same_bits(tmp_path):
    new = CONSTRUCT + "with torch.no_grad():\n            self.bn.bias.neg_()"
    result, _ = _verify(tmp_path, new)
    assert result.faults == [
        "bn.bias differs at the same seed; initial values must be bitwise equal"
    ]


def test_batch_is_cut_only_when_it_is_larger(tmp_path):
    _, text = _verify(tmp_path, "pass", batch=16)
    assert "cut from 64 to 16" in text
    _, text = _verify(tmp_path, "pass", batch=100)
    assert "cut from" not in text


def test_founding_linear_scale_batch_norm_passes_at_reduced_size(tmp_path):
    source = (PROBLEMS / "linear_scale_batch_norm.py").read_text()
    sizes = "BATCH, IN_FEATURES, OUT_FEATURES = 16384, 4096, 4096"
    assert sizes in source
    path = tmp_path / "linear_scale_batch_norm.py"
    path.write_text(source.replace(sizes, "BATCH, IN_FEATURES, OUT_FEATURES = 96, 70, 33"))
    assert verify_file(path, device="cpu", out=io.StringIO()).passed


@pytest.mark.parametrize("path", sorted(PROBLEMS.glob("*.py")), ids=lambda path: path.stem)
def test_founding_problems_have_the_interface(path):
    names: dict[str, object] = {}
    exec(compile(path.read_text(), path, "exec"), names)
    assert callable(names["get_inputs"])
    assert names["Model"](*names["get_init_inputs"]()).state_dict()


def test_the_tier_decides_flags_and_what_passes(tmp_path):
    new = FORWARD + "return super().forward(x) * (1 + 3e-4)"
    result, text = _verify(tmp_path, new)
    assert not result.passed
    assert "tier ieee (TF32 off)" in text.splitlines()[0]
    result, text = _verify(tmp_path, new, tier="tf32")
    assert result.passed
    assert "tier tf32 (TF32 allowed)" in text.splitlines()[0]
    assert {check.limit for check in result.checks if "output" in check.what} == {2.0**-10}


@pytest.mark.parametrize(("tier", "allowed"), [("ieee", False), ("tf32", True)])
def test_both_models_run_at_the_flags_of_the_tier(tmp_path, tier, allowed):
    flags = "torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32"
    new = FORWARD + f"assert ({flags}) == ({allowed}, {allowed})\n        return super().forward(x)"
    assert _verify(tmp_path, new, tier=tier)[0].passed


def test_results_without_a_finite_element_do_not_pass(tmp_path):
    result, text = _verify(tmp_path, "pass", inputs="torch.full((64, 48), float('nan'))")
    assert not result.passed
    assert "nothing compared" in text
    result, text = _verify(tmp_path, "pass", inputs="torch.empty(0, 48)")
    assert not result.passed
    assert "nothing compared" in text


def test_our_data_outside_of_a_models_domain_are_no_fault(tmp_path):
    path = tmp_path / "problem.py"
    text = FILE.replace("(self.gemm(x) * self.scale)", "(self.gemm(x.sqrt()) * self.scale).sum()")
    path.write_text(text.replace("{new}", "pass"))
    out = io.StringIO()
    assert verify_file(path, device="cpu", out=out).passed
    assert "randn: output (nothing compared: no element is finite)" in out.getvalue()


def test_what_loading_a_state_raises_is_modelnews_fault(tmp_path):
    new = "def load_state_dict(self, *_):\n        raise RuntimeError('frozen')"
    result, text = _verify(tmp_path, new)
    assert not result.passed
    assert "ModelNew.load_state_dict raised RuntimeError: frozen" in text


def test_extra_state_that_is_no_tensor_is_no_fault(tmp_path):
    path = tmp_path / "problem.py"
    extra = "    def get_extra_state(self):\n        return {}\n\n"
    extra += "    def set_extra_state(self, state):\n        pass\n\n"
    forward = "    def forward(self, x):"
    path.write_text(FILE.replace(forward, extra + forward).replace("{new}", "pass"))
    assert verify_file(path, device="cpu", out=io.StringIO()).passed


def test_nested_inputs_are_drawn_and_cut(tmp_path):
    path = tmp_path / "problem.py"
    text = FILE.replace("forward(self, x)", "forward(self, pair)").replace(
        "gemm(x)", "gemm(pair[0])"
    )
    path.write_text(
        text.replace("{new}", "pass").replace("[torch.rand(64, 48)]", "[[torch.rand(64, 48)]]")
    )
    out = io.StringIO()
    assert verify_file(path, device="cpu", batch=16, out=out).passed
    assert "cut from 64 to 16" in out.getvalue()


@pytest.mark.parametrize(("shape", "batch"), [((64, 2**16), 16), ((64, 2**21), 2)])
def test_large_inputs_are_cut_by_their_elements_on_the_cpu(tmp_path, shape, batch):
    path = tmp_path / "problem.py"
    source = FILE.replace("torch.rand(64, 48)", f"torch.ones(1).expand{shape}")
    source = source.replace("self.bn(self.gemm(x) * self.scale)", "self.scale * x.mean()")
    path.write_text(source.replace("{new}", "pass"))
    out = io.StringIO()
    assert verify_file(path, device="cpu", out=out).passed
    assert f"cut from 64 to {batch} along" in out.getvalue()
