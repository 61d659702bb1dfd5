"""Train with every optimizer and every technique that it concerns, recount the effect, write docs/optimizers.md.

``python benchmarks/optimizers.py [WORD ...]``: the cells not yet tried, or again those whose names hold a word.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Runs, arguments_of_cells, device, today, write_between
from optimizer_cells import CHECKS, Cell, CellError, equal, stop_of
from optimizer_kinds import Kind, all_kinds
from optimizer_runs import Net, Run, checkpoint, train

PAGE = Path(__file__).resolve().parents[1] / "docs" / "optimizers.md"
FILE = RESULTS / "optimizers.jsonl"
COMMAND = "make optimizers"
PACKAGES = {"torch.optim": "torch", "muon": "muon-optimizer", "optimi": "torch-optimi"}
"""Names on the package index that differ from the library's."""
PLAIN = "without"
NAMES_OF_FAMILIES = ("LBFGS", "LOMO", "manual optimization", "more than one optimizer")


def refusal(error: Exception, net: Any, optimizers: list[str]) -> dict[str, Any]:
    """Return what became of a run that ended with our error: it must come by the first step and name the optimizer."""
    detail = " ".join(str(error).split())
    if len(net.seen) > 4:  # SAM makes two passes a step, and lora needs four steps to see that nothing moves
        return {"status": "fails", "detail": f"refused after {len(net.seen)} forwards: {detail}"}
    if not any(name.lower() in detail.lower() for name in (*optimizers, *NAMES_OF_FAMILIES)):
        return {"status": "fails", "detail": f"names none of {', '.join(optimizers)}: {detail}"}
    return {"status": "refused", "detail": detail}


def try_cell(cell: Cell, technique: str, resumes: bool) -> dict[str, Any]:
    """Return whether a cell works, is refused, or fails."""
    from shared_core.errors import EffError

    if not resumes:
        cell.resumes = lambda run, net=None: None  # type: ignore[method-assign]
    optimizers = [kind.__name__ for one in cell.plain.optimizers for kind in type(one).__mro__[:2]]
    try:
        CHECKS[technique](cell)
    except CellError as error:
        return {"status": "fails", "detail": str(error)}
    except EffError as error:
        if cell.made > 1:
            return {"status": "fails", "detail": f"refused in run {cell.made}: {' '.join(str(error).split())}"}
        return refusal(error, cell.last, optimizers)
    except Exception as error:
        return {"status": "fails", "detail": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {"status": "works"}


def try_plain(kind: Kind, folder: Path) -> tuple[dict[str, Any], Run | None]:
    """Train without techniques, and resume; return what became of it, and the run."""
    try:
        run = train(kind, Net(kind.bias), folder / PLAIN)
    except Exception as error:
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return {"status": "does not run", "detail": detail, "resumes": False}, None
    if equal(run.weights, dict(Net(kind.bias).state_dict())):
        return {"status": "does not run", "detail": "changes no weight", "resumes": False}, None
    try:
        again = train(kind, Net(kind.bias), folder / "again", resume=checkpoint(run, stop_of(kind)))
        resumes = equal(again.weights, run.weights)
    except Exception:
        resumes = False
    return {"status": "works", "resumes": resumes}, run


def try_kind(kind: Kind, folder: Path, techniques: list[str], results: Any) -> None:
    """Try the cells of an optimizer in this process, and send their results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder.mkdir()
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    begun = time.process_time()
    found, plain = try_plain(kind, folder)
    results.send((PLAIN, found | {"seconds": round(time.process_time() - begun, 1)}))
    for technique in techniques if plain else ():
        begun = time.process_time()
        (folder / technique).mkdir()
        result = try_cell(Cell(kind, folder / technique, plain), technique, found["resumes"])
        results.send((technique, result | {"seconds": round(time.process_time() - begun, 1)}))
    results.close()


def in_process(kind: Kind, folder: Path, techniques: list[str]) -> Mapping[str, dict[str, Any]]:
    """Try the cells of an optimizer in a forked process, which shares the imports and takes its patches with it."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=try_kind, args=(kind, folder, techniques, send))
    process.start()
    send.close()
    found: dict[str, dict[str, Any]] = {}
    while True:
        try:
            technique, result = receive.recv()
        except EOFError:
            break
        found[technique] = result
    process.join()
    lost = {"status": "fails", "detail": f"the process ended with {process.exitcode}"}
    if PLAIN not in found:
        found[PLAIN] = lost | {"status": "does not run", "resumes": False}
    if found[PLAIN]["status"] == "works":
        found |= {technique: lost for technique in techniques if technique not in found}
    return found


def version_of(library: str) -> str:
    """Return the installed version of a library, empty if there is none."""
    try:
        return version(PACKAGES.get(library, library))
    except PackageNotFoundError:
        return ""


def _alike(detail: str) -> str:
    """Return a refusal without the names of optimizers and techniques."""
    without = re.sub(r"\b(recipe|" + "|".join(CHECKS) + r")\b", "T", detail)
    return re.sub(r"\b[A-Z]\w*", "X", re.sub(r"(\S+ of |\w+\.)(?=[A-Z])", "", without))


def page_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, one row for optimizers of a library that are alike, and the refusals below it."""
    numbers: dict[str, int] = {}
    refusals: list[str] = []
    rows: dict[tuple[str, ...], list[str]] = {}
    kinds = [kind for kind in all_kinds() if f"{kind.title} x {PLAIN}" in results]
    ran = [kind for kind in kinds if results[f"{kind.title} x {PLAIN}"]["status"] == "works"]

    def text(found: Mapping[str, Any]) -> str:
        if found["status"] != "refused":
            return "✓" if found["status"] == "works" else f"**{found['status']}**"
        if (key := _alike(found["detail"])) not in numbers:
            numbers[key] = len(numbers) + 1
            refusals.append(found["detail"])
        return str(numbers[key])

    for kind in ran:
        cells = tuple(text(results[f"{kind.title} x {technique}"]) for technique in CHECKS)
        rows.setdefault((kind.library, *cells), []).append(kind.name)
    lines = [
        "| library | optimizers | " + " | ".join(f"`{key}`" for key in CHECKS) + " |",
        "|---|---|" + "---|" * len(CHECKS),
    ]
    lines += [f"| {library} | {', '.join(names)} | {' | '.join(cells)} |" for (library, *cells), names in rows.items()]
    found = [results[f"{kind.title} x {PLAIN}"] for kind in kinds]
    notes = [f"{number}. `{line}`" for number, line in enumerate(refusals, start=1)]
    libraries = {kind.library: results[f"{kind.title} x {PLAIN}"]["version"] for kind in kinds}
    versions = ", ".join(f"{library} {number}".strip() for library, number in libraries.items() if number)
    caption = "; ".join(sorted({f"{one['date']}, {one['device']}" for one in found})) + f". {versions}."
    table = "\n".join(lines)
    return f"{caption}\n\n{table}\n\n" + "\n".join(notes) + f"\n\n{_exceptions(kinds, ran, results)}\n"


def _exceptions(kinds: list[Kind], ran: list[Kind], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what does not run on a CPU, and what does not resume, both without techniques."""
    missing = [f"{kind.name} ({kind.library})" for kind in kinds if kind not in ran]
    inexact = [f"{kind.name} ({kind.library})" for kind in ran if not results[f"{kind.title} x {PLAIN}"]["resumes"]]
    return (
        f"- Not tested, because they don't run here without efftrain either: {', '.join(missing)}.\n"
        f"- Not resumed, because they don't resume exactly without efftrain either: {', '.join(inexact)}."
    )


def main() -> int:
    """Return 1 if a cell neither works nor is refused by the first step."""
    arguments = arguments_of_cells(__doc__)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    kinds = {kind.title: kind for kind in all_kinds()}
    names = {f"{title} x {technique}": (title, technique) for title in kinds for technique in (PLAIN, *CHECKS)}
    runs = Runs(FILE)
    again = [name for name in names if any(word in name for word in arguments.words)]
    if again or all(f"{title} x {PLAIN}" in runs for title in kinds):
        runs.forget(again or None)
    about = {"date": today(), "device": device()}
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="eff-optimizers-"))
    folder.mkdir(exist_ok=True)
    for module in ("hf_eff", "lightning_eff.pytorch", "pytorch_lightning", "transformers.trainer"):
        __import__(module)
    gc.freeze()  # the Trainer collects garbage after each run
    for number, (title, kind) in enumerate(kinds.items()):
        runs_here = [technique for technique in CHECKS if f"{title} x {technique}" not in runs]
        known = runs.of(f"{title} x {PLAIN}", dict) if f"{title} x {PLAIN}" in runs else None
        if known is not None and (known["status"] != "works" or not runs_here):
            continue
        found = in_process(kind, folder / str(number), runs_here)
        found[PLAIN] = found[PLAIN] | about | {"version": version_of(kind.library)}
        for technique, result in found.items():
            runs.of(f"{title} x {technique}", lambda result=result: result)
        if not arguments.keep:
            shutil.rmtree(folder / str(number))
    results = {name: runs.of(name, dict) for name in names if name in runs}
    write_between(PAGE, COMMAND, page_text(results))
    failed = [name for name, found in results.items() if found["status"] == "fails"]
    print(f"{len(results)} cells, {len(failed)} fail{': ' if failed else ''}{'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
