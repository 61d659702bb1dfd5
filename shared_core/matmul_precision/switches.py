"""Torch's precision settings for float32 products, and their effect on a device."""

from __future__ import annotations

from typing import Any

import torch

from shared_core.hardware import float32_matmul_format, float32_matmul_precision, matmul_hardware

_BACKENDS: Any = torch.backends  # partly without annotations


def switches() -> tuple[str, str, str]:
    """Return torch's setting and the newer per-backend switches."""
    newer = _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision
    return float32_matmul_precision(), *newer


def restore(switches: tuple[str, str, str]) -> None:
    """Restore the settings that `switches` returned."""
    precision, *newer = switches
    # This overwrites the newer switches, so they are set afterwards.
    torch.set_float32_matmul_precision("highest" if precision == "mixed" else precision)
    _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision = newer


def tried(precision: str, device: torch.device) -> tuple[str, str]:
    """Return the format of float32 products at a precision, and the reason if it changes nothing (else empty)."""
    before = switches()
    torch.set_float32_matmul_precision(precision)
    try:
        found = float32_matmul_format(device)
        return found, why_inactive(precision, device, found)
    finally:
        restore(before)


def why_inactive(asked: str, device: torch.device, found: str | None) -> str:
    """Return why products are not computed in a precision; empty if they are."""
    if (found == "float32") == (asked == "highest"):
        return ""
    if asked == "highest":
        return f"products on {device.type} are still rounded to {found}"
    still = f"float32 products on {device.type} stay float32, because"
    if device.type == "cuda":
        if matmul_hardware(device)["tf32"]:
            return f"{still} TF32 is switched off outside torch (for example by NVIDIA_TF32_OVERRIDE=0)"
        major, minor = torch.cuda.get_device_capability(device)
        return f"{still} compute capability {major}.{minor} has no TF32 (NVIDIA GPUs from 8.0 on have it)"
    if device.type != "cpu":
        return f"{still} this device has no such switch"
    if asked == "high":
        return f"{still} a CPU has no TF32; medium allows bfloat16 where oneDNN uses it"
    if not (_BACKENDS.mkldnn.is_available() and _BACKENDS.mkldnn.enabled):
        return f"{still} oneDNN is missing or switched off"
    if not matmul_hardware(device)["bf16"]:
        return f"{still} this CPU has no bf16 instructions"
    return f"{still} oneDNN does not use this CPU's bf16 instructions for them"
