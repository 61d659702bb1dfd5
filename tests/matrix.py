"""Run a share of the tests at five points of the versions that pyproject.toml allows: ``matrix.py [POINT ...]``.

Each point gets a virtual environment of its own in the folder that ``MATRIX`` names, or in one that is removed again. A
torch that would bring CUDA along, gigabytes of it, is left out unless ``MATRIX_CUDA=1``; ``PIP_EXTRA_INDEX_URL`` may
name an index with CPU wheels.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lightning(version: str) -> list[str]:
    return [f"pytorch-lightning=={version}", f"lightning=={version}"]


VERSIONS = {
    "oldest": ["torch==2.11.*", "transformers==4.57.*", "accelerate==1.8.*", *lightning("2.5.0")],
    "5.0": ["torch==2.11.*", "transformers==5.0.*", "accelerate==1.10.*", *lightning("2.5.6")],
    "5.5": ["torch==2.13.*", "transformers==5.5.4", "accelerate==1.11.*", *lightning("2.6.1")],
    "5.16": ["torch==2.13.*", "transformers==5.16.1", "accelerate==1.13.*", *lightning("2.6.4")],
    "newest": ["torch", "transformers", "accelerate", "pytorch-lightning", "lightning"],
}
TESTS = [
    "tests/promises",
    "tests/hf_eff/test_trainer.py",
    "tests/hf_eff/resume",
    "tests/lightning_eff/test_callback.py",
    "tests/lightning_eff/test_command_line.py",
    "tests/lightning_eff/resume",
]


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, text=True, **options)  # type: ignore[call-overload]


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def install(point: str, folder: Path) -> str | None:
    """Return why not, None if all is installed."""
    pip, pins = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"], folder / "pins.txt"
    run(sys.executable, "-m", "venv", folder, check=True)
    run(*pip, "install", "--upgrade", "pip", check=True)  # an older one downloads wheels only to read what they require
    pins.write_text("\n".join(version for version in VERSIONS[point] if "=" in version))
    report = folder / "torch.json"
    wanted = run(*pip, "install", "--dry-run", "--no-deps", "--report", report, VERSIONS[point][0], capture_output=True)
    if wanted.returncode:
        return wanted.stderr.strip().splitlines()[-1]
    (torch,) = (entry["metadata"] for entry in json.loads(report.read_text())["install"])
    brings = any("cudnn" in line and "extra ==" not in line for line in torch.get("requires_dist", []))
    if brings and sys.platform == "linux" and os.environ.get("MATRIX_CUDA") != "1":
        return f"torch {torch['version']} is only found with CUDA; MATRIX_CUDA=1 takes it"
    done = run(*pip, "install", "--constraint", pins, "--editable", ".[dev]", VERSIONS[point][0], capture_output=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def main(points: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="eff-matrix-") as temporary:
        for point in points:
            folder = Path(os.environ.get("MATRIX") or temporary).resolve() / point
            if (reason := install(point, folder)) is not None:
                say(f"matrix: {point} was not tested: {reason}")
                continue
            python = folder / "bin" / "python"
            run(python, "-m", "pip", "freeze", "--exclude-editable", stdout=(folder / "versions.txt").open("w"))
            code = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS).returncode
            say(f"matrix: {point} {'passed' if code == 0 else 'FAILED'}: {', '.join(VERSIONS[point])}")
            failed |= code != 0
    return failed


if __name__ == "__main__":
    sys.exit(main([point for point in VERSIONS if point in sys.argv[1:]] or list(VERSIONS)))
