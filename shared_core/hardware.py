"""Describe this machine: its libraries, its capabilities, and the precision of matrix products and how to set it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from eff_kernels.fp8 import multiplies_fp8

from shared_core.libraries import installed_version

_SIZE = 256
_RENAMED = {"avx512f": "avx512_f", "asimd": "neon", "svebf16": "sve_bf16"}  # Linux's names: torch's
_CPU_INFO = Path("/proc/cpuinfo")


def default_device() -> torch.device:
    """Return where training runs by default: the first CUDA device, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now(device: torch.device) -> float:
    """Return seconds for differences: of CPU time on a CPU, else of the clock once the device has finished."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def milliseconds(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[list[float]]:
    """Return the milliseconds of each call by `now`, in rounds in which they take turns, after a warm-up round.

    On a CPU, torch uses one thread.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    rounds: list[list[float]] = []
    try:
        for _ in range(repeats + 1):
            rounds.append([])
            for each in calls:
                start = now(device)
                each()
                rounds[-1].append(1e3 * (now(device) - start))
    finally:
        torch.set_num_threads(threads)
    return [[*times] for times in zip(*rounds[1:], strict=True)]


def cpu_capabilities() -> Mapping[str, Any]:
    """Return ``torch.cpu.get_capabilities()``, or what Linux says: torch has it from 2.11 on."""
    if (asked := getattr(torch.cpu, "get_capabilities", None)) is not None:
        found: Mapping[str, Any] = asked()
        return found
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.is_file() else []
    report = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    words = f"{report.get('flags', '')} {report.get('Features', '')}".split()
    return {_RENAMED.get(word, word): True for word in words} | {"cpu_name": report.get("model name", "unknown")}


def matmul_hardware(device: torch.device | str | None = None) -> dict[str, bool]:
    """Return which of ``tf32``, ``bf16`` and ``fp8`` a device has instructions to multiply.

    TF32 and bf16: NVIDIA of compute capability 8.0 and later; FP8: 8.9 and later; bf16 on CPU: AVX-512 BF16, AMX or
    their Arm counterpart.

    Args:
        device: None: `default_device`.
    """
    where = torch.device(device) if device is not None else default_device()
    if where.type == "cuda":
        recent = torch.version.hip is None and torch.cuda.get_device_capability(where) >= (8, 0)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return {"tf32": recent, "bf16": bf16, "fp8": multiplies_fp8(where)}
    if where.type != "cpu":
        return {"tf32": False, "bf16": False, "fp8": False}
    able = cpu_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16")
    return {"tf32": False, "bf16": any(bool(able.get(name)) for name in names), "fp8": False}


@torch.no_grad()
def float32_matmul_format(device: torch.device | str) -> Literal["float32", "tf32", "bf16"]:
    """Return the format that float32 matrix products on a device round their factors to now, by measuring it.

    No table of devices tells it: on CPUs with bf16 instructions oneDNN may still multiply in float32. Products of
    ``1 + 2^-12`` (more bits than TF32's 10) and ``1 + 2^-9`` (more than bfloat16's 7) with a unit matrix show it.

    Example:
        >>> before = torch.get_float32_matmul_precision()
        >>> torch.set_float32_matmul_precision("highest")
        >>> float32_matmul_format("cpu")
        'float32'
        >>> torch.set_float32_matmul_precision(before)
    """
    where = torch.device(device)
    unit = torch.eye(_SIZE, device=where)
    with torch.autocast(where.type, enabled=False):
        kept = [bool((torch.full_like(unit, x) @ unit == x).all()) for x in (1 + 2.0**-12, 1 + 2.0**-9)]
    if kept[0]:
        return "float32"
    return "tf32" if kept[1] else "bf16"


def float32_matmul_precision() -> str:
    """Return torch's setting for float32 products; ``"mixed"`` where torch cannot say, since newer switches are set."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def environment() -> dict[str, Any]:
    """Return versions, the device, torch's setting for float32 products, and formats that the hardware multiplies."""
    libraries = ("efftrain", "torch", "transformers", "accelerate", "pytorch-lightning", "lightning")
    return {
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "libraries": {name: found for name in libraries if (found := installed_version(name))},
        "float32_matmul_precision": float32_matmul_precision(),
        "multiplies": matmul_hardware(),
    }


_BACKENDS: Any = torch.backends  # partly without annotations


def matmul_switches() -> tuple[str, str, str]:
    """Return torch's setting and the newer per-backend switches."""
    newer = _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision
    return float32_matmul_precision(), *newer


def restore_matmul(switches: tuple[str, str, str]) -> None:
    """Restore the settings that `matmul_switches` returned."""
    precision, *newer = switches
    # This overwrites the newer switches, so they are set afterwards.
    torch.set_float32_matmul_precision("highest" if precision == "mixed" else precision)
    _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision = newer


def tried_matmul(precision: str, device: torch.device) -> tuple[str, str]:
    """Return the format of float32 products at a precision, and the reason if it changes nothing (else empty)."""
    before = matmul_switches()
    torch.set_float32_matmul_precision(precision)
    try:
        found = float32_matmul_format(device)
        return found, why_matmul_inactive(precision, device, found)
    finally:
        restore_matmul(before)


def why_matmul_inactive(asked: str, device: torch.device, found: str | None) -> str:
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
