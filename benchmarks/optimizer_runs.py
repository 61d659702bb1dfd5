"""Short runs of a small network in the trainers, with techniques or without, and in a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from optimizer_kinds import LEARNING_RATE, Kind
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS, ROWS, BATCH, WIDTH = 8, 32, 8, 64
TEMPERATURE, ALPHA = 2.0, 0.5
State = dict[str, Tensor]


class Net(nn.Module):
    """Three linear layers that note which examples they saw in training.

    Args:
        bias: False for matrices alone.
        seed: Of the weights.
        poisoned: The training forward whose loss is infinite, from 1 on; 0: none.
        teacher: Adds a distillation loss computed here, from the step after `begin` on.
        begin: Steps without that loss.
    """

    def __init__(self, bias: bool = True, seed: int = 0, poisoned: int = 0, teacher: Any = (), begin: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            sizes = (16, WIDTH), (WIDTH, WIDTH)
            self.layers = nn.ModuleList([nn.Linear(*size, bias=bias) for size in sizes])
            self.head = nn.Linear(WIDTH, 4, bias=bias)
        self.poisoned, self.teacher, self.begin = poisoned, teacher, begin
        self.seen: list[Tensor] = []

    def logits(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        logits = self.logits(x)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        if self.training:
            self.seen.append(index.clone())
            if len(self.seen) == self.poisoned:
                loss = loss * float("inf")
            if self.teacher and len(self.seen) > self.begin:
                loss = ALPHA * loss + (1 - ALPHA) * soft_loss(logits, self.teacher[0].logits(x).detach())
        return {"loss": loss, "logits": logits}


class Teacher(Net):
    """The same layers, of inputs alone."""

    def forward(self, x: Tensor, labels: Any = None, index: Any = None) -> dict[str, Tensor]:
        return {"logits": self.logits(x)}


def soft_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return ``T² KL(teacher ‖ student)``, averaged over examples."""
    s, t = (torch.log_softmax(one / TEMPERATURE, -1) for one in (student, teacher))
    return TEMPERATURE**2 * (t.exp() * (t - s)).sum(-1).mean()


class Examples(Dataset[dict[str, Tensor]]):
    """Random inputs with the labels of a random linear map."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, 16, generator=generator)
        self.labels = (self.x @ torch.randn(16, 4, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index], "index": torch.tensor(index)}

    def batch(self, index: Tensor) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index], "index": index}


@dataclass
class Run:
    """What a run left: final weights after the optimizer's ``eval``, weights of each step's checkpoint, examples."""

    net: Net
    optimizers: Sequence[Any]
    weights: State = field(default_factory=dict)
    saved: State = field(default_factory=dict)
    steps: dict[int, State] = field(default_factory=dict)
    folder: Path = Path()

    def end(self) -> Run:
        """Take the weights that the optimizers leave for evaluation."""
        for optimizer in self.optimizers:
            with contextlib.suppress(Exception):
                getattr(optimizer, "eval", lambda: None)()
        self.weights = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        return self


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of accelerate and Lightning."""
    while type(optimizer).__module__.startswith(("accelerate.", "pytorch_lightning.")):
        optimizer = optimizer.optimizer
    return optimizer


def train(
    kind: Kind, net: Net, folder: Path, recipe: Mapping[str, Any] | None = None, resume: Path | None = None
) -> Run:
    """Train a net for 8 batches, with a checkpoint after each, in the trainer of this kind."""
    run = {"hf": _train_hf, "own": _train_own}.get(kind.loop, _train_lightning)
    return run(kind, net, folder, dict(recipe or {}), resume)


def hf_trainer(kind: Kind, net: Net, folder: Path, late: bool = False) -> Any:
    """Return a Trainer that is given the optimizer, or with `late` makes it when training starts."""
    from transformers import Trainer, TrainingArguments

    class MakesOptimizer(Trainer):  # type: ignore[misc]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if kind.make and self.optimizer is None:
                self.optimizer = kind.make(self.model)
            return super().create_optimizer(*args, **kwargs)

    options = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "use_cpu": True,
        "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": 0.01, "max_grad_norm": 0.0,
        "save_strategy": "steps", "save_steps": 1, "logging_strategy": "no", "report_to": "none", "seed": 3,
        "disable_tqdm": True, "remove_unused_columns": False, **kind.options,
    }  # fmt: skip
    given: dict[str, Any] = {"optimizers": (kind.make(net), None)} if kind.make and not late else {}
    return MakesOptimizer(model=net, args=TrainingArguments(**options), train_dataset=Examples(), **given)


def _train_hf(kind: Kind, net: Net, folder: Path, recipe: dict[str, Any], resume: Path | None) -> Run:
    from hf_eff import attach

    # low_rank and lora replace parameters, so the optimizer is made of theirs
    trainer = hf_trainer(kind, net, folder, late=bool(recipe.keys() & {"low_rank", "lora"}))
    if recipe:
        attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    files = {int(path.parent.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*/model.safetensors")}
    steps = {step: load_file(path) for step, path in sorted(files.items())}
    run = Run(net, [unwrapped(trainer.optimizer)], steps=steps, folder=folder).end()
    trainer.save_model(str(folder / "final"))
    run.saved = load_file(folder / "final" / "model.safetensors")
    return run


def checkpoint(run: Run, step: int) -> Path:
    """Return the file or folder to resume from."""
    if (folder := run.folder / f"checkpoint-{step}").exists():
        return folder
    return run.folder / f"batch-{step}.ckpt"


def _two_passes(module: Any, loss: Callable[[], Tensor]) -> None:
    optimizer = module.optimizers()
    module.manual_backward(loss())
    optimizer.first_step(zero_grad=True)
    module.manual_backward(loss())
    optimizer.second_step(zero_grad=True)


def _closure(module: Any, loss: Callable[[], Tensor]) -> None:
    optimizer = module.optimizers()
    module.manual_backward(loss())
    optimizer.step(closure=lambda: module.manual_backward(loss()))
    optimizer.zero_grad()


def _two(module: Any, loss: Callable[[], Tensor]) -> None:
    module.manual_backward(loss())
    for optimizer in module.optimizers():
        optimizer.step()
        optimizer.zero_grad()


def _graph(module: Any, loss: Callable[[], Tensor]) -> None:
    optimizer = module.optimizers()
    module.manual_backward(loss(), create_graph=True)
    optimizer.step()
    optimizer.zero_grad()


LOOPS: dict[str, Callable[[Any, Callable[[], Tensor]], None] | None] = {
    "automatic": None, "two passes": _two_passes, "closure": _closure, "two": _two, "graph": _graph,
}  # fmt: skip
"""What ``training_step`` does with manual optimization in Lightning; None is automatic optimization."""


def _train_lightning(kind: Kind, net: Net, folder: Path, recipe: dict[str, Any], resume: Path | None) -> Run:
    import pytorch_lightning as pl

    from lightning_eff import EffCallback
    from lightning_eff.pytorch import LossScalingPrecision

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net, LOOPS[kind.loop] is None

        def configure_optimizers(self) -> Any:
            return kind.make(self.net) if kind.make else None

        def training_step(self, batch: Any, _: int) -> Any:
            if (loop := LOOPS[kind.loop]) is None:
                return self.net(**batch)["loss"]
            return loop(self, lambda: self.net(**batch)["loss"])

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(folder / f"batch-{trainer.fit_loop.epoch_loop.total_batch_idx + 1}.ckpt")

    scaling = recipe.pop("loss_scale", None)
    plugins = [] if scaling is None else [LossScalingPrecision(precision="32-true", **scaling)]
    if "distill" in recipe:
        recipe["distill"] = {**recipe["distill"], "student": "net"}
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    trainer = pl.Trainer(
        max_epochs=STEPS * BATCH // ROWS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, plugins=plugins,
        callbacks=[*([EffCallback(recipe)] if recipe else []), Save()],
    )  # fmt: skip
    module = Module()
    loader = DataLoader(Examples(), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=str(resume) if resume else None, weights_only=False if resume else None)
    files = {int(path.stem.rpartition("-")[2]): path for path in folder.glob("batch-*.ckpt")}
    run = Run(net, [*map(unwrapped, trainer.optimizers)], folder=folder).end()
    run.steps = {step: _plain(torch.load(path, weights_only=False)) for step, path in sorted(files.items())}
    trainer.save_checkpoint(folder / "final.ckpt", weights_only=True)
    run.saved = _plain(torch.load(folder / "final.ckpt", weights_only=False), "state_dict")
    return run


def _train_own(kind: Kind, net: Net, folder: Path, recipe: dict[str, Any], resume: Path | None) -> Run:
    from shared_core import training

    torch.manual_seed(3)
    folder.mkdir(exist_ok=True)
    run = Run(net, [kind.make(net) if kind.make else None], folder=folder, steps={})
    (optimizer,), loader = run.optimizers, DataLoader(Examples(), batch_size=BATCH)
    before = torch.load(resume, weights_only=False) if resume else {}
    replaces = "low_rank" in recipe  # then the saved names are those of the changed model
    if before and not replaces:
        net.load_state_dict(before["model"])
    resumed = {"resumed": before["session"]} if before and recipe else {}
    block = training(recipe, net, optimizer, total_steps=STEPS, loader=loader, **resumed) if recipe else None
    with block or contextlib.nullcontext() as loop:
        if before and replaces:
            net.load_state_dict(before["model"])
        if before:
            optimizer.load_state_dict(before["optimizer"])
        getattr(optimizer, "train", lambda: None)()
        batches = iter(batch for _ in range(STEPS) for batch in (loop.loader if loop else loader))
        for step in range(int(resume.stem.rpartition("-")[2]) + 1 if resume else 1, STEPS + 1):
            with loop.forward() if loop else contextlib.nullcontext():
                loss = net(**next(batches))["loss"]
            (loop.backward if loop else Tensor.backward)(loss)
            (loop or optimizer).step()
            (loop or optimizer).zero_grad()
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | ({"session": loop.session.state_dict()} if loop else {}), folder / f"batch-{step}.ckpt")
            run.steps[step] = {name: value.clone() for name, value in net.state_dict().items()}
    run.saved = run.end().weights
    return run


def _plain(file: dict[str, Any], raw: str = "eff_raw_state_dict") -> State:
    weights = file.get(raw) or file["state_dict"]
    return {name.removeprefix("net."): value for name, value in weights.items()}


def replay(kind: Kind, net: Net, seen: Sequence[Tensor], gradients: Callable[[Net, Tensor], Any]) -> State:
    """Train in a plain loop on given examples, and return the weights.

    Args:
        kind: Whose optimizer steps.
        net: A fresh net.
        seen: Examples of each step.
        gradients: Fills the gradients of the net for given examples.
    """
    optimizer = kind.make(net) if kind.make else unwrapped(hf_trainer(kind, net, Path("unused")).create_optimizer())
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for one in optimizers:
        getattr(one, "train", lambda: None)()
    for index in seen:

        def backward(index: Tensor = index) -> None:
            gradients(net, index)

        if kind.loop != "automatic":
            backward()
        for one in optimizers:
            one.step(*([backward] if kind.loop == "automatic" else []))
            one.zero_grad()
    return Run(net, optimizers).end().weights
