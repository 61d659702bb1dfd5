"""Resolve other libraries beside this one with pip, install nothing, write the table of docs/integrations.md.

``python benchmarks/resolved_versions.py [LIBRARY ...]``: the libraries not yet resolved, or these again. It needs a
package index, about 30 minutes, and no other environment: pip resolves as in an empty one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import RESULTS, Runs, today, write_between

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "integrations.md"
FILE = RESULTS / "resolved_versions.jsonl"
COMMAND = "make versions"
SHOWN = ("torch", "transformers", "lightning", "huggingface-hub")
SECONDS = 900
_HF = ("trl", "peft", "axolotl", "llamafactory", "setfit", "sentence-transformers", "adapters", "unsloth", "gliner",
       "happytransformer", "span-marker", "torchtune", "ray")  # fmt: skip
_LIGHTNING = ("litgpt", "neuralforecast", "darts", "pytorch-forecasting", "chemprop", "lightly", "monai", "skorch",
              "fastai", "ultralytics", "timm", "segmentation-models-pytorch")  # fmt: skip
LIBRARIES = {**dict.fromkeys(_HF, "hf"), **dict.fromkeys(_LIGHTNING, "lightning")}
"""Each library, and which extra of ours its users install."""


def normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def resolve(pip: Path, folder: Path, *requirements: str) -> dict[str, Any]:
    """Return the version of each package that pip would install, or the last line of its error."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [str(pip), "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    try:
        done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {SECONDS // 60} minutes"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        return {"error": (errors or done.stderr.strip().splitlines())[0].removeprefix("ERROR: ")}
    found = json.loads(report.read_text())["install"]
    return {normalized(one["metadata"]["name"]): one["metadata"]["version"] for one in found}


def resolved(pip: Path, folder: Path, wheel: Path, library: str) -> dict[str, Any]:
    """Return what pip resolves for a library alone, and beside ours."""
    begun = time.monotonic()
    alone = resolve(pip, folder, library)
    both = resolve(pip, folder, f"{wheel}[{LIBRARIES[library]}]", library)

    def shown(found: Mapping[str, str]) -> dict[str, str]:
        found = {**found, "lightning": found.get("lightning") or found.get("pytorch-lightning")}
        return {name: found[name] for name in (library, *SHOWN, "error") if found.get(name)}

    about = {"seconds": round(time.monotonic() - begun, 1), "date": today(), "python": platform.python_version()}
    return {"alone": shown(alone), "together": shown(both), **about}


def page_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, and below it each library of which pip takes another version beside ours, or none."""
    lines = ["| library | extra | " + " | ".join(SHOWN) + " |", "|---|---|" + "---|" * len(SHOWN)]
    notes = []
    for library, found in sorted(results.items()):
        alone, both = found["alone"], found["together"]
        if "error" in alone:
            notes.append(f"- {library} does not install even alone: {alone['error']}")
        elif "error" in both:
            notes.append(f"- {library} does not install beside efftrain: {both['error']}")
        elif alone[library] != both[library]:
            notes.append(f"- {library} alone is {alone[library]}.")
        cells = [both.get(name, "").partition("+")[0] for name in (library, *SHOWN)]  # without a build's name
        lines.append(f"| {library} {cells[0]} | `{LIBRARIES[library]}` | {' | '.join(cells[1:])} |".replace("  ", " "))
    dates = sorted({f"{found['date']}, Python {found['python']}" for found in results.values()})
    text = "\n".join(notes) or "Alone, each library resolves to the same version of itself."
    return f"{'; '.join(dates)}.\n\n" + "\n".join(lines) + f"\n\n{text}\n"


def main() -> None:
    """Resolve what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="resolve these again")
    again = parser.parse_args().libraries
    runs = Runs(FILE)
    if again or all(name in runs for name in LIBRARIES):
        runs.forget(again or None)
    with tempfile.TemporaryDirectory(prefix="eff-versions-") as name:
        folder = Path(name)
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", name]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "venv", with_pip=True)
        pip = folder / "venv" / "bin" / "pip"
        subprocess.run([pip, "install", "--quiet", "--upgrade", "pip"], check=True)  # an older one downloads wheels
        for library in again or LIBRARIES:
            runs.of(library, lambda library=library: resolved(pip, folder, wheel, library))
    write_between(PAGE, COMMAND, page_text({library: runs.of(library, dict) for library in LIBRARIES}))


if __name__ == "__main__":
    main()
