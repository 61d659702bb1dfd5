"""A run of all techniques in a process of its own: ``FRONT_END FOLDER [CHECKPOINT]``."""

import sys
from pathlib import Path

import promise_drivers
import torch
from promise_table import TOGETHER, recipe_of


def main(front_end: str, folder: str, resume: str | None = None) -> None:
    torch.manual_seed(3)
    options = {"save_every": 1, "dropout": 0.3, "shuffle": True, "resume": Path(resume) if resume else None}
    getattr(promise_drivers, f"run_{front_end}")(recipe_of(*TOGETHER), Path(folder), **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
