"""Devices are described without a GPU, and one that no kernel runs on is named before a launch."""

from typing import Any

import pytest

from .native import binding

_C = binding()


def test_device_by_hand_is_an_h200() -> None:
    device = _C.DeviceProps()
    assert (device.major, device.minor, device.sm_count) == (9, 0, 132)
    assert _C.check_device(device) is None


def test_fields_are_kept() -> None:
    fields: dict[str, Any] = {
        "index": 3,
        "major": 8,
        "minor": 6,
        "sm_count": 84,
        "shared_bytes": 101376,
        "l2_bytes": 6 << 20,
        "driver_version": 12040,
        "name": "NVIDIA RTX A6000",
    }
    device = _C.DeviceProps(**fields)
    assert {name: getattr(device, name) for name in fields} == fields


def test_long_name_is_cut() -> None:
    assert _C.DeviceProps(name="x" * 100).name == "x" * 63


@pytest.mark.parametrize(("major", "minor"), [(6, 1), (7, 0), (7, 5)])
def test_older_architecture_is_refused_in_words(major: int, minor: int) -> None:
    device = _C.DeviceProps(index=2, major=major, minor=minor, name="NVIDIA Other")
    text = _C.check_device(device)
    for word in ("device 2", "NVIDIA Other", f"{major}.{minor}", "sm_90a", "8.0", "PyTorch"):
        assert word in text


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_ampere_and_later_run(major: int, minor: int) -> None:
    assert _C.check_device(_C.DeviceProps(major=major, minor=minor)) is None


def test_device_that_is_not_there() -> None:
    count = _C.device_count()
    assert count >= 0
    # Without a driver that is what is said, with its remedy.
    with pytest.raises((ValueError, RuntimeError), match=f"{count + 5}|driver") as caught:
        _C.query_device(count + 5)
    text = str(caught.value)
    assert "numbered from 0" in text or "install it" in text or "update the driver" in text


def test_queried_device_has_its_ordinal() -> None:
    if _C.device_count() == 0:
        pytest.skip("needs a GPU")
    device = _C.query_device(0)
    assert device.index == 0
    assert device.sm_count > 0
    assert device.shared_bytes >= 48 << 10
    assert device.driver_version >= 13000
    assert device.name


def test_build_is_described_in_one_line() -> None:
    text = _C.build_info()
    assert "\n" not in text
    for word in ("nvcc ", "CUTLASS ", "sm_80", "sm_90a", "compute_90"):
        assert word in text
    assert _C.abi_version() == _C.ABI_VERSION
    assert len(_C.version().split(".")) == 3
