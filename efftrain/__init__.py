"""The main package: loops, sessions, recipes and functions of `shared_core`, plus `hf` and `lightning`."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

__version__ = importlib.metadata.version("efftrain")
_HOMES = {
    **dict.fromkeys(("EffError", "Recipe", "Session", "register", "training"), "shared_core"),
    **dict.fromkeys(("conversion_report", "convert", "quantize"), "shared_core.quantization"),
    "export_onnx": "shared_core.tools.export",
    "shrink": "shared_core.tools.shrink",
    "sparse_layers": "shared_core.tools.sparse_inference",
}
_FRONT_ENDS = ("hf", "lightning")
__all__ = ["__version__", *_HOMES, *_FRONT_ENDS]


def __getattr__(name: str) -> Any:  # names load on first use, including torch and the trainers
    if name in _FRONT_ENDS:
        return importlib.import_module(f"efftrain.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if homes := [home for home in _FRONT_ENDS if name in importlib.import_module(f"{home}_eff").__all__]:
        lines = " or ".join(f"`from efftrain.{home} import {name}`" for home in homes)
        raise ImportError(f"efftrain: {name} belongs to a trainer; write {lines}", name="efftrain")
    raise AttributeError(f"module 'efftrain' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted(__all__)
