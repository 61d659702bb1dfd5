"""Print how much there is to read, and what the usual paths run through: ``python benchmarks/size_of_code.py``."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("efftrain", "hf_eff", "kernels", "lightning_eff", "shared_core")
OURS = tuple(f"{ROOT / package}/" for package in PACKAGES)
WITHOUT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
RECIPE = {
    "prune": {"sparsity": 0.5, "begin": 1, "end": 9, "every": 4},
    "distill": {"teacher": "ema"},
    "qat": {"scheme": "int8"},
}
"""A technique of each kind: one on weights, one on the loss, one on activations."""


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # where the trainers' own lines go
        counted = [*of_source(), *of_paths()]
    for name, value in counted:
        print(f"{name:<66}{value:>7,}")


# -- lines and names


def of_source() -> Iterator[tuple[str, int]]:
    """Yield what is counted in the source files, and how many there are."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    engine = ROOT / "shared_core" / "engine"
    docs = {file: docstring_lines(tree) for file, tree in trees.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    yield "files", len(files)
    yield "of them __init__.py", sum(file.name == "__init__.py" for file in files)
    yield "lines", sum(map(lines_of, files))
    yield "lines of code", sum(len(code_lines(file) - docs[file]) for file in files)
    yield "lines of docstrings", sum(map(len, docs.values()))
    yield "lines of tests", sum(map(lines_of, (ROOT / "tests").rglob("*.py")))
    yield "lines of engine/*.py", sum(map(lines_of, engine.glob("*.py")))
    for name in ("Session", "Technique"):
        found = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
        members = [one for node in found for one in node.body if isinstance(one, ast.FunctionDef)]
        methods = [one for one in members if not one.name.startswith("_")]
        yield f"lines of {name}", sum((node.end_lineno or 0) - node.lineno + 1 for node in found)
        yield f"public methods and properties of {name}", len(methods)
    yield "raise statements", sum(isinstance(node, ast.Raise) for node in nodes)
    yield (
        "private names of the trainers",
        sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PrivateName" for node in nodes),
    )


def lines_of(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n")


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold docstrings."""
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    found = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    return {line for doc in found for line in range(doc.lineno, (doc.end_lineno or 0) + 1)}


def code_lines(file: Path) -> set[int]:
    """Return the numbers of the lines that hold code or docstrings, without blank lines and comments."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


# -- calls


def of_paths() -> Iterator[tuple[str, int]]:
    """Yield how many calls, and files with them, each usual path enters."""
    for name, step in (("masks stay", 3), ("new masks", 5)):
        entered = calls_of_step(RECIPE, step)
        yield f"calls in a step of {' + '.join(RECIPE)}, {name}", entered.total()
        yield "  files entered", len(entered)
    for name, train in (("Trainer", train_in_trainer), ("Lightning", train_in_lightning)):
        with tempfile.TemporaryDirectory() as folder:
            train(folder)  # imports, and saves the checkpoints to resume from
            first = functools.partial(train, folder, until_first=True)
            yield f"files entered from a new {name} with pruning to its first step", len(calls_of(first))
            yield f"  on a resume of the {name}", len(calls_of(functools.partial(first, resume=True)))


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Return how often each file of the library was entered by a call."""
    files: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            files[frame.f_code.co_filename] += 1

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


def calls_of_step(recipe: dict[str, Any], step: int) -> Counter[str]:
    """Return the calls of one step of a plain loop."""
    from shared_core import Recipe, Session

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    session = Session(Recipe.from_dict(recipe))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=9)

    def train() -> None:
        with session.forward():
            loss = session.loss(F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)))
        loss.backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()

    for _ in range(step - 1):
        train()
    entered = calls_of(train)
    session.finish()
    return entered


class Net(nn.Module):
    """A model as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


DATA = [{"x": torch.ones(4), "labels": torch.tensor(1)} for _ in range(16)]


def train_in_trainer(folder: str, until_first: bool = False, resume: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from efftrain.hf import Pruning

    class Stop(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            raise InterruptedError

    arguments = TrainingArguments(folder, report_to=[], max_steps=4, save_steps=2, disable_tqdm=True, use_cpu=True)
    trainer = Trainer(Net(), arguments, train_dataset=DATA, callbacks=[Pruning(sparsity=0.5)])
    if not until_first:
        trainer.train()
        return
    trainer.add_callback(Stop())
    with contextlib.suppress(InterruptedError):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)


def train_in_lightning(folder: str, until_first: bool = False, resume: bool = False) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from efftrain.lightning import Pruning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Stop(lightning.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            raise InterruptedError

    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[Pruning(sparsity=0.5), saving, *([Stop()] if until_first else [])],
    )  # fmt: skip
    with contextlib.suppress(InterruptedError):
        checkpoint = f"{folder}/step=2.ckpt" if resume else None
        trainer.fit(Module(), torch.utils.data.DataLoader(DATA, 4), ckpt_path=checkpoint)


if __name__ == "__main__":
    main()
