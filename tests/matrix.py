"""Run tests marked ``matrix`` at five points of the versions that pyproject.toml allows: ``matrix.py [POINT ...]``.

Each point gets a virtual environment of its own in the folder that ``MATRIX`` names, or in one that is removed again,
with the Python of the point where ``python3.X`` is a command. A torch that would bring CUDA along, gigabytes of it, is
left out unless ``MATRIX_CUDA=1``; ``PIP_EXTRA_INDEX_URL`` may name an index with CPU wheels.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lightning(version: str) -> list[str]:
    return [f"pytorch-lightning=={version}", f"lightning=={version}"]


POINTS = {  # the Python, then torch and the others; Triton's interpreter (3.6, of torch 2.10) fails with newer NumPy
    "oldest": [
        "3.12",
        "torch==2.10.*",
        "transformers==4.57.*",
        "accelerate==1.8.*",
        *lightning("2.5.0"),
        "numpy==2.3.*",
    ],
    "5.0": ["3.11", "torch==2.11.*", "transformers==5.0.*", "accelerate==1.10.*", *lightning("2.5.6")],
    "5.5": ["3.11", "torch==2.13.*", "transformers==5.5.4", "accelerate==1.11.*", *lightning("2.6.1")],
    "5.16": ["3.11", "torch==2.13.*", "transformers==5.16.1", "accelerate==1.13.*", *lightning("2.6.4")],
    "newest": ["3.14", "torch", "transformers", "accelerate", "pytorch-lightning", "lightning"],
}
FILES = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.matrix" in path.read_text("utf-8"))


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, text=True, **options)  # type: ignore[call-overload]


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def python_of(version: str) -> str | None:
    found = shutil.which(f"python{version}")  # of pyenv it may be a command that only says which Pythons there are
    return found if found and run(found, "-c", "", capture_output=True).returncode == 0 else None


def install(python: str, versions: list[str], folder: Path) -> str | None:
    """Return why not, None if all is installed."""
    pip, pins = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"], folder / "pins.txt"
    run(python, "-m", "venv", folder, check=True)
    run(*pip, "install", "--upgrade", "pip", check=True)  # an older one downloads wheels only to read what they require
    pins.write_text("\n".join(version for version in versions if "=" in version))
    report = folder / "torch.json"
    wanted = run(
        *pip, "install", "--dry-run", "--ignore-installed", "--no-deps", "--report", report, versions[0],
        capture_output=True,
    )  # fmt: skip
    if wanted.returncode:
        return wanted.stderr.strip().splitlines()[-1]
    (torch,) = (entry["metadata"] for entry in json.loads(report.read_text())["install"])
    brings = any("cudnn" in line and "extra ==" not in line for line in torch.get("requires_dist", []))
    if brings and sys.platform == "linux" and os.environ.get("MATRIX_CUDA") != "1":
        return f"torch {torch['version']} is only found with CUDA; MATRIX_CUDA=1 takes it"
    done = run(*pip, "install", "--constraint", pins, "--editable", ".[dev]", versions[0], capture_output=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def test(point: str, folder: Path) -> bool:
    version, *versions = POINTS[point]
    if (found := python_of(version)) is None:
        found, version = sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}, without python{version}"
    about = ", ".join([f"Python {version}", *versions])
    if (reason := install(found, versions, folder)) is not None:
        say(f"matrix: {point} was not tested ({about}): {reason}")
        return True
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "freeze", "--exclude-editable", stdout=(folder / "versions.txt").open("w"))
    options = ["-q", "-p", "no:cacheprovider", "-m", "matrix"]
    passed = run(python, "-P", "-m", "pytest", *options, *FILES).returncode == 0
    say(f"matrix: {point} {'passed' if passed else 'FAILED'}: {about}")
    return passed


def main(points: list[str]) -> int:
    ended = []
    for point in points:
        with tempfile.TemporaryDirectory(prefix="eff-matrix-") as temporary:
            ended.append(test(point, Path(os.environ.get("MATRIX") or temporary).resolve() / point))
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main([point for point in POINTS if point in sys.argv[1:]] or list(POINTS)))
