"""The program that `pruning.py` watches: pruning decides twice over many weights. Prints its result as JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import torch
from torch import nn

from shared_core import Recipe, Session

LAYERS = 25


def anonymous_bytes() -> int:
    """Return how much memory this process holds now, mapped files left out."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    torch.set_num_threads(1)
    width = round((int(sys.argv[1]) / LAYERS) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    recipe = {"sparsity": 0.9, "initial_sparsity": 0.5, "schedule": "linear", "begin": 0, "end": 1}
    session = Session(Recipe.from_dict({"prune": recipe}))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the first one imports much
    before = anonymous_bytes()
    seconds = []
    for update in ("first", "last"):
        start = time.process_time()
        if update == "first":
            session.begin([optimizer], total_steps=1)
        else:
            session.before_step()
            session.after_step()
        seconds.append(time.process_time() - start)
    numel = LAYERS * width**2
    zeros = sum(int((weight == 0).sum()) for weight in model.parameters())
    if zeros != round(0.9 * numel):
        raise RuntimeError(f"must prune {round(0.9 * numel)} weights, got {zeros}")
    print(json.dumps({"numel": numel, "before": before, "seconds": seconds}))


if __name__ == "__main__":
    main()
