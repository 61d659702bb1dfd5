"""The tests of integer and reduced arithmetic as on lesser processors: ``python tests/processors.py [NAME]``.

Torch, oneDNN and MKL choose their kernels once, when they are loaded, by variables that must be set before.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSORS = {
    "sse4": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    # as a user sets one library's variable and not the others'
    "mixed": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
TESTS = (
    "eff_kernels/test_exact_sums.py",
    "eff_kernels/test_integer_linear.py",
    "shared_core/fp8/test_casts.py",
    "shared_core/quantization/test_conv1d.py",
    "shared_core/quantization/integer/test_convert.py",
    "shared_core/tools/export/test_export.py",
    "shared_core/tools/export/test_unsigned.py",
    "shared_core/quantization/integer/test_backends.py",
    "shared_core/quantization/integer/test_onednn.py",
)


def main(names: list[str]) -> int:
    """Run the tests on the processors named, on all without a name; return on how many something failed."""
    if unknown := sorted(set(names) - PROCESSORS.keys()):
        raise SystemExit(f"processors: names must be of {', '.join(PROCESSORS)}, got {', '.join(unknown)}")
    failed = 0
    for name in names or PROCESSORS:
        variables = PROCESSORS[name]
        print(f"\n{name}: {' '.join(f'{key}={value}' for key, value in variables.items())}", flush=True)  # noqa: T201
        command = [sys.executable, "-P", "-m", "pytest", "-q", *(str(ROOT / "tests" / test) for test in TESTS)]
        # inductor compiles for the processor that it finds
        command += ["-m", "not slow and not gpu", "-k", "not inductor", "-p", "no:cacheprovider"]
        failed += subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
