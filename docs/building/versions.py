"""Add the built pages to a folder of versions: ``python docs/building/versions.py site FOLDER``.

Each version has its own folder. ``versions.json`` lists them in mike's format, which the theme shows in the header.
``index.html`` leads to the newest one.
"""

import json
import shutil
import sys
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
INDEX = '<!doctype html><title>efftrain</title><meta http-equiv="refresh" content="0; url={0}/">\n'


def add(site: Path, folder: Path) -> None:
    """Copy a site into the folder of this package's version, in place of an earlier copy, and list all versions."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    known = sorted((path.parent.name for path in folder.glob("*/index.html")), key=Version, reverse=True)
    listed = [{"version": one, "title": one, "aliases": ["latest"] if one == known[0] else []} for one in known]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(INDEX.format(known[0]), encoding="utf-8")


if __name__ == "__main__":
    add(Path(sys.argv[1]), Path(sys.argv[2]))
