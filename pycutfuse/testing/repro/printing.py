"""Configurations as Python to paste."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def source(config: Any) -> str:
    """`config` as Python to paste; fields that have their default value are left out."""
    lines = []
    for item in fields(config):
        value = getattr(config, item.name)
        if value != item.default:
            lines.append(f"    {item.name}={_source(value)},\n")
    return f"{type(config).__name__}(\n{''.join(lines)})"


def _source(value: Any) -> str:
    if is_dataclass(value):
        inner = [
            f"{item.name}={_source(getattr(value, item.name))}"
            for item in fields(value)
            if getattr(value, item.name) != item.default
        ]
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, tuple):
        inside = ", ".join(_source(part) for part in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)
