"""Every Triton kernel compiles to a cubin for sm_90 on a machine without a GPU.

`kernels()` of each ``test_*_triton.py`` yields ``(kernel, types, constants, num_warps)``: the Triton type of each
argument by name (``fp32`` where it is not named) and the values of the constexpr ones. Each is compiled once more with
its integers as constants: a launch makes a constant of an argument that equals 1, which has no methods of a tensor.
Interpreting is settled when Triton is imported, so that all of them compile in one process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

FILES = sorted(Path(__file__).parent.glob("test_*_triton.py"))


def compile_all():
    import runpy

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for file in FILES:
        count = 0
        for kernel, types, constants, num_warps in runpy.run_path(str(file))["kernels"]():
            ones = {name: 1 for name in kernel.arg_names if types.get(name) in ("i32", "i64") and name not in constants}
            for fixed in (constants, constants | ones):
                kinds = types | dict.fromkeys(fixed, "constexpr")
                signature = {name: kinds.get(name, "fp32") for name in kernel.arg_names}
                source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
                made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
                if not made.asm["cubin"]:
                    raise AssertionError(f"{file.name}: {kernel} made no cubin")
                count += 1
        sys.stdout.write(f"{file.name} {count}\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_sm_90():
    code = f"import runpy; runpy.run_path({__file__!r})['compile_all']()"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert set(counts) == {file.name for file in FILES}
    assert all(int(count) > 0 for count in counts.values()), counts
