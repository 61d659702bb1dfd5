"""The programs that `soup.py` runs: ours, and the reference algorithm. Each prints its result as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_core.soup import greedy_soup

LAYERS = 25
SCORES = "scores.json"


def make(folder: Path, checkpoints: int, parameters: int) -> dict[str, Any]:
    """Write checkpoints that differ by noise, as fine-tunings of one model do, every other one with more of it."""
    torch.manual_seed(0)
    width = round((parameters / LAYERS) ** 0.5)
    base = {f"layers.{i}.weight": torch.randn(width, width) for i in range(LAYERS)}
    base["layers.0.weight"][0] = 0
    scores = {}
    for number in range(checkpoints):
        noise = 0.4 if number % 2 else 0.1
        model = {name: weight + noise * torch.randn(width) for name, weight in base.items()}
        path = folder / f"{number:02d}.pt"
        torch.save(model, path)
        scores[path.name] = score(model)
    (folder / SCORES).write_text(json.dumps(scores))
    return {"bytes": 4 * LAYERS * width**2}


def score(state_dict: dict[str, Tensor]) -> float:
    """Return a metric that costs nothing: how near the first row is to what it was before the noise."""
    return -float(next(iter(state_dict.values()))[0].square().mean())


def ours(paths: list[Path], known: list[float] | None) -> list[str]:
    return greedy_soup(paths, score, strict=True, scores=known).ingredients


def reference(paths: list[Path], known: list[float] | None) -> list[str]:
    """Return the members of the greedy soup as its authors' published code finds them (arXiv:2203.05482).

    The soup so far and the next checkpoint are two state dicts, the candidate a third, made from scaled clones;
    checkpoints are read whole by ``torch.load``.
    """
    singles = [score(torch.load(path, map_location="cpu")) for path in paths] if known is None else known
    ranked = sorted(zip(paths, singles, strict=True), key=lambda pair: pair[1], reverse=True)
    members, best = [str(ranked[0][0])], ranked[0][1]
    soup = torch.load(members[0], map_location="cpu")
    for path, _ in ranked[1:]:
        new = torch.load(path, map_location="cpu")
        n = len(members)
        candidate = {name: soup[name].clone() * (n / (n + 1.0)) + new[name].clone() * (1.0 / (n + 1.0)) for name in new}
        metric = score(candidate)
        if metric > best:
            members.append(str(path))
            best, soup = metric, candidate
    return members


def nothing(paths: list[Path], known: list[float] | None) -> list[str]:
    return []


def main() -> None:
    torch.set_num_threads(1)
    program, folder = sys.argv[1], Path(sys.argv[2])
    if program == "make":
        result = make(folder, int(sys.argv[3]), int(sys.argv[4]))
    else:
        paths = sorted(folder.glob("*.pt"))[: int(sys.argv[4]) if len(sys.argv) > 4 else None]
        scores = json.loads((folder / SCORES).read_text())
        known = [scores[path.name] for path in paths] if sys.argv[3] == "known" else None
        start = time.process_time()
        members = {"ours": ours, "reference": reference, "nothing": nothing}[program](paths, known)
        result = {"seconds": time.process_time() - start, "members": members}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
