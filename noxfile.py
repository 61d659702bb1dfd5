"""Checks in environments of their own: ``nox --list`` shows them, ``nox -s "matrix(oldest)"`` runs one.

``PIP_EXTRA_INDEX_URL`` may name an index with CPU wheels of torch. ``nox -r`` keeps and reuses the environments.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["package"]
ROOT = Path(__file__).parent
ENV = {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def python(version: str) -> str:
    """Return this Python if the machine has no other. A command of pyenv may exist and still not run."""
    found = shutil.which(f"python{version}")
    runs = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    return version if runs else f"{sys.version_info[0]}.{sys.version_info[1]}"


def point(name: str, version: str, torch: str, *others: str, lightning: str | None = None) -> object:
    """Return one set of versions: the Python, torch, and what else is pinned."""
    pins = [*others, *(f"{package}=={lightning}" for package in ("pytorch-lightning", "lightning") if lightning)]
    return nox.param(python(version), torch, pins, id=name)


NUMPY = "numpy==2.3.*"  # Triton's interpreter (3.6, of torch 2.10) fails with a newer one
POINTS = [
    point("oldest", "3.12", "torch==2.10.*", "transformers==4.57.*", "accelerate==1.8.*", NUMPY, lightning="2.5.0"),
    point("5.0", "3.11", "torch==2.11.*", "transformers==5.0.*", "accelerate==1.10.*", lightning="2.5.6"),
    point("5.5", "3.11", "torch==2.13.*", "transformers==5.5.4", "accelerate==1.11.*", lightning="2.6.1"),
    point("5.16", "3.11", "torch==2.13.*", "transformers==5.16.1", "accelerate==1.13.*", lightning="2.6.4"),
    point("newest", "3.14", "torch"),
]


def skip_cuda(session: nox.Session, torch: str) -> None:
    """Skip if the index has this torch only with CUDA, which takes gigabytes; MATRIX_CUDA=1 takes it."""
    session.install("--upgrade", "pip")  # an older one downloads wheels only to read what they require
    report = Path(session.create_tmp()) / "torch.json"
    session.install("--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), torch)
    (about,) = (entry["metadata"] for entry in json.loads(report.read_text())["install"])
    cuda = any("cudnn" in line and "extra ==" not in line for line in about.get("requires_dist", []))
    if cuda and sys.platform == "linux" and os.environ.get("MATRIX_CUDA") != "1":
        session.skip(f"torch {about['version']} is only found with CUDA, which MATRIX_CUDA=1 takes")


@nox.session
@nox.parametrize("python,torch,pins", POINTS)
def matrix(session: nox.Session, torch: str, pins: list[str]) -> None:
    """Run the tests marked ``matrix`` with one set of versions; MATRIX_CUDA=1 also takes a torch with CUDA."""
    skip_cuda(session, torch)
    session.install("--editable", ".[dev]", torch, *pins)
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.matrix" in path.read_text("utf-8")]
    session.run("python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "matrix", *files, env=ENV)


LIBRARIES = {"fastai": ["fastai>=2.8"], "skorch": ["skorch>=1.4"], "ultralytics": ["ultralytics>=8.4", "torchvision"]}


@nox.session
@nox.parametrize("library", [*LIBRARIES], ids=[*LIBRARIES])
def libraries(session: nox.Session, library: str) -> None:
    """Run the tests of a callback with the library itself; MATRIX_CUDA=1 also takes a torch with CUDA."""
    torch = "torch==2.13.*"
    skip_cuda(session, torch)
    session.install("--editable", ".[dev]", torch, *LIBRARIES[library])
    test, options = f"tests/libraries/test_{library}.py", ("-m", "slow or not slow")
    session.run("python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, test, env=ENV)


@nox.session
def build(session: nox.Session) -> None:
    """Build the source archive, and from it the wheel, into dist/."""
    session.install("build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build")


@nox.session(requires=["build"])
def package(session: nox.Session) -> None:
    """Use the wheel in dist/ where nothing else is installed, then with both trainers."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    pinned = ("--constraint", "constraints.txt")
    session.install(*pinned, "torch")
    session.install(*pinned, str(wheel))
    program = str(ROOT / "tests" / "package.py")
    session.run("python", program, "alone", env=ENV)
    session.install(*pinned, f"{wheel}[hf,lightning]")
    session.run("python", program, "trainers", env=ENV)
    for extra in nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]:
        session.install(*pinned, "--dry-run", f"{wheel}[{extra}]")


@nox.session
def changelog(session: nox.Session) -> None:
    """Move what is in changes/ into CHANGELOG.md: ``nox -s changelog -- 0.2.0``; ``--draft`` only prints it."""
    session.install("towncrier>=24.8")
    version, *options = session.posargs
    session.run("towncrier", "build", "--version", version, "--yes", *options)
