"""Torch's settings of the precision of float32 products, and what they change on a device."""

from __future__ import annotations

from typing import Any

import torch

from shared_core.hardware import float32_matmul_format, float32_matmul_precision, matmul_hardware

_BACKENDS: Any = torch.backends  # half of it has no annotations


def switches() -> tuple[str, str, str]:
    """Return torch's setting, and the newer switches of each backend behind it."""
    newer = _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision
    return float32_matmul_precision(), *newer


def restore(switches: tuple[str, str, str]) -> None:
    """Set what `switches` returned."""
    precision, *newer = switches
    # this one overwrites the newer switches, so that they come second
    torch.set_float32_matmul_precision("highest" if precision == "mixed" else precision)
    _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision = newer


def tried(precision: str, device: torch.device) -> tuple[str, str]:
    """Return the format of float32 products with a precision, and why it changes nothing; empty if it does."""
    before = switches()
    torch.set_float32_matmul_precision(precision)
    try:
        found = float32_matmul_format(device)
        return found, why_inactive(precision, device, found)
    finally:
        restore(before)


def why_inactive(asked: str, device: torch.device, found: str | None) -> str:
    """Return why a precision is not what products are computed in; empty if it is."""
    if (found == "float32") == (asked == "highest"):
        return ""
    if asked == "highest":
        return f"products on {device.type} are still rounded to {found}"
    still = f"float32 products on {device.type} stay float32, because"
    if device.type == "cuda":
        if matmul_hardware(device)["tf32"]:
            return f"{still} TF32, which this GPU has, is switched off outside torch (NVIDIA_TF32_OVERRIDE=0, say)"
        major, minor = torch.cuda.get_device_capability(device)
        return f"{still} compute capability {major}.{minor} has no TF32 (NVIDIA's of 8.0 and later have)"
    if device.type != "cpu":
        return f"{still} this device has no such switch"
    if asked == "high":
        return f"{still} a CPU has no TF32; medium allows bfloat16 where oneDNN uses it"
    if not (_BACKENDS.mkldnn.is_available() and _BACKENDS.mkldnn.enabled):
        return f"{still} oneDNN is not there or switched off"
    if not matmul_hardware(device)["bf16"]:
        return f"{still} this CPU has no bf16 instructions"
    return f"{still} oneDNN does not use this CPU's bf16 instructions for them"
