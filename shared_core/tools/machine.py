"""List this machine's resources for training: processors, number formats, kernels, compilers, processes."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from eff_kernels._triton.launch import has_triton
from eff_kernels.quantization.integer_linear import sums_exactly

from shared_core.config.environments import Ability
from shared_core.engine.registry import REGISTRY
from shared_core.hardware import cpu_capabilities, matmul_hardware
from shared_core.tools.sparse_inference.layers import two_four_here

_INSTRUCTIONS = (
    "avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16",
    "neon", "sve", "bf16", "sve_bf16",
)  # fmt: skip


def devices() -> list[dict[str, Any]]:
    """Return the CPU, then each GPU: name, cores and instructions, or compute capability and memory in bytes."""
    able = cpu_capabilities()
    cpu = {
        "device": "cpu", "name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "instructions": [name for name in _INSTRUCTIONS if able.get(name)],
    }  # fmt: skip
    gpus = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        able_to = {"capability": f"{about.major}.{about.minor}", "memory": about.total_memory}
        gpus.append({"device": f"cuda:{index}", "name": about.name, **able_to})
    return [cpu, *gpus]


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def formats(device: torch.device) -> dict[str, str]:
    """Return how a device computes with each format: ``native``, or what it does instead.

    Example:
        >>> formats(torch.device("cpu"))["fp8"]
        'emulated in float32: slower than without'
    """
    multiplies = matmul_hardware(device)
    able = cpu_capabilities()
    on_gpu = device.type == "cuda"
    fp16 = on_gpu or bool(able.get("avx512_fp16") or able.get("amx_fp16"))
    integers = on_gpu or sums_exactly("linear")
    by = "torchao's kernels and torch's" if find_spec("torchao") else "torch's kernels alone"
    return {
        "tf32": "native" if multiplies["tf32"] else "none: float32 products stay float32",
        "bf16": "native" if multiplies["bf16"] else "works, without instructions of its own: slow",
        "fp16": "native" if fp16 else "works, without instructions of its own: slow",
        "fp8": "native" if multiplies["fp8"] else "emulated in float32: slower than without",
        "int8": f"{'native' if integers else 'weights of 7 bits at most (those of 8 saturate)'}, by {by}",
        "2:4": two_four_here(device),
    }


def tools() -> dict[str, str]:
    """Return a description of Triton, the compiler for torch.compile and process backends on this machine."""
    compilers = (shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
    compiler = next(filter(None, compilers), "")
    ways = torch.distributed
    backends = {
        "nccl": ways.is_available() and ways.is_nccl_available(),
        "gloo": ways.is_available() and ways.is_gloo_available(),
        "mpi": ways.is_available() and ways.is_mpi_available(),
    }
    return {
        "triton": "found" if has_triton() else "none: kernels run as plain torch",
        "torch.compile": compiler or "no C++ compiler found: on the CPU it fails; install g++",
        "distributed": ", ".join(name for name, there in backends.items() if there) or "none",
    }


def abilities(device: torch.device) -> dict[str, Ability]:
    """Return how each technique runs on a device, by recipe key."""
    return {key: one.config_class.ability(device) for key, one in REGISTRY.items()}
