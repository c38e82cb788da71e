"""`info` says of each operator what its kernels take, or why none runs."""

import pytest

from pycutfuse import _loader, info


def test_without_a_library_no_operator_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loader, "_native", _loader.Native(None, "not built"))
    found = info.collect()
    assert len(found["operators"]) == 7
    for what in found["operators"].values():
        assert what == "plain torch chains: the native library is not loaded"
    assert "not built" in info.render(found)
