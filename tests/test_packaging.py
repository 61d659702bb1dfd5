"""What is released: the wheel holds the packages and nothing else, the source archive everything."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("efftrain", "hf_eff", "lightning_eff", "shared_core")
PACKAGES = {"eff_kernels": "kernels/eff_kernels", **{name: name for name in FOLDERS}}
NOT_OURS = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "site", "lightning_runs", "lightning_logs", "checkpoints",
    "tmp_trainer",
)  # fmt: skip


def not_ours(folder, names):
    """Return what git ignores; deeper than the root, a folder `runs` is a package."""
    return NOT_OURS(folder, names) | ({"runs"} & {*names} if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build both in a copy: setuptools leaves a build folder behind, from which a later wheel would take old files."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    shutil.copytree(ROOT, tree, ignore=not_ours)
    out = tree.parent
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    program = f"from hatchling import build as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return files, zipfile.ZipFile(wheel), source


def about(wheel, file):
    (name,) = (name for name in wheel.namelist() if name.endswith(f".dist-info/{file}"))
    return wheel.read(name).decode()


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(built):
    files, wheel, _ = built
    wanted = {
        f"{package}/{file.removeprefix(f'{folder}/')}"
        for package, folder in PACKAGES.items()
        for file in files
        if file.startswith(f"{folder}/")
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted
    assert wanted >= {f"{package}/py.typed" for package in PACKAGES}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_the_source_archive_holds_everything(built):
    files, _, source = built
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert {name for name in names if not name.startswith("efftrain.egg-info/")} - {"PKG-INFO", "setup.cfg"} == files


def test_the_page_of_an_index_has_no_links_into_the_repository(built):
    told = email.message_from_string(about(built[1], "METADATA"))
    page = told.get_payload()
    assert told["Description-Content-Type"].startswith("text/markdown")
    assert re.findall(r"\]\((?!https?:)|\]\[|^\[.*\]:", page, flags=re.M) == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^#+ .*", page, flags=re.M) == re.findall(r"^#+ .*", readme, flags=re.M)


@pytest.mark.slow
def test_the_wheel_works_where_it_is_unpacked(built, tmp_path):
    wheel = built[1]
    wheel.extractall(tmp_path)
    entries = ConfigParser()
    entries.read_string(about(wheel, "entry_points.txt"))
    named = [value for section in entries.sections() for value in dict(entries[section]).values()]
    assert len(named) == 5
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import importlib, importlib.metadata as metadata
for name in {[*PACKAGES]}:
    assert importlib.import_module(name).__file__.startswith({str(tmp_path)!r}), name
for value in {named}:
    metadata.EntryPoint("", value, "").load()
print(metadata.version("efftrain"))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'version = "{done.stdout.strip()}"' in (ROOT / "pyproject.toml").read_text()
