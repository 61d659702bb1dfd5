"""Ways to run a recipe on the same model, seed and data: loops, bare or of accelerate or Fabric, and both trainers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import backward, update
from promise_table import BATCH, DEVICE, NUM_STEPS, DigitsNet, eval_examples, make_net, train_examples
from safetensors.torch import load_file
from schedule_free import ScheduleFree
from torch import Tensor
from torch.utils.data import DataLoader

from shared_core import Recipe, Session
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.receipt import VARIABLE
from shared_core.engine.saving.state_file import rng_state, set_rng_state
from shared_core.engine.services import Services

LEARNING_RATE = 0.01
CLIP = 1.0


@dataclass
class Result:
    """What a run left behind: the plain final weights, the receipt, and the checkpoint folder or file of each step."""

    weights: dict[str, Tensor]
    receipt: dict[str, Any]
    checkpoints: dict[int, Path] = field(default_factory=dict)
    model: DigitsNet | None = None


@contextlib.contextmanager
def states_at_finish() -> Iterator[list[dict[str, Any]]]:
    """Collect the state of every session that ends inside: the last moment at which masks and ranges are alive."""
    states: list[dict[str, Any]] = []
    finish = Session.finish

    def keep(self: Session) -> None:
        if self.has_begun and not self.is_finished:
            states.append(self.state_dict())
        finish(self)

    Session.finish = keep  # type: ignore[method-assign]
    try:
        yield states
    finally:
        Session.finish = finish  # type: ignore[method-assign]


def on_device() -> list[dict[str, Tensor]]:
    """Return the training examples where a plain loop trains."""
    return [{key: value.to(DEVICE) for key, value in row.items()} for row in train_examples()]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what the model holds, on the CPU."""
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def batches(accumulate: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batches in the order of the data, without shuffling."""
    data, size = on_device(), BATCH // accumulate
    stacked = [data[i : i + size] for i in range(0, len(data), size)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in stacked]  # type: ignore[misc]


def _optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "schedule_free":
        return ScheduleFree(parameters)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    fused = True if "fused" in name else None  # False would be another implementation than the trainers' on a GPU
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)


class LoopServices(Services):
    """What a plain loop can do for a technique: run the first of its batches again."""

    def __init__(self, model: DigitsNet, data: list[dict[str, Tensor]]) -> None:
        self._model, self._data = model, data

    def calibrate(self, num_batches: int) -> None:
        training = self._model.training
        self._model.train()
        with torch.no_grad():
            for batch in self._data[:num_batches]:
                self._model(**batch)
        self._model.train(training)


def _receipt(folder: Path) -> dict[str, Any]:
    path = Path(folder) / "eff_receipt.json"
    return json.loads(path.read_text()) if path.is_file() else {}


_TIMES = ("_runtime", "_per_second", "_time", "seconds")


def told(receipt: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a receipt says of a run, without times, the machine, and the run's own folder."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if not key.endswith(_TIMES)}
            return {key: timeless(each) for key, each in kept.items() if not key.startswith("memory/")}
        return [timeless(each) for each in value] if isinstance(value, list) else value

    assert receipt["finished"]
    return timeless(json.loads(json.dumps(receipt).replace(str(folder), "folder")) | {"environment": None})


def run_bare(
    recipe: Any,
    *,
    accumulate: int = 1,
    batch_norm: bool = True,
    optim: str = "adamw_torch",
    clip: float | None = None,
    optimizer_first: bool = False,
    max_steps: int | None = None,
    planned: int | None = None,
) -> Result:
    """A plain loop that divides the loss by the number of micro-batches, as both trainers do."""
    clip = CLIP if clip is None else clip
    max_steps = NUM_STEPS if max_steps is None else max_steps  # read here: tests of other models set it
    model = make_net(batch_norm=batch_norm, recipe=recipe).to(DEVICE)
    services = LoopServices(model, batches(accumulate))
    session = Session(recipe, services=services)
    if optimizer_first:
        optimizer = _optimizer(optim, model.parameters())
        attach_with(session, model, [optimizer])
    else:
        session.attach(model)
        optimizer = _optimizer(optim, model.parameters())
    steps_per_epoch = len(batches(accumulate)) // accumulate
    epochs: list[Any] = [batches(accumulate) for _ in range(-(-max_steps // steps_per_epoch))]
    if (private := session.techniques.get("dp")) is not None:
        loader = private.loader(DataLoader(on_device(), batch_size=BATCH // accumulate), accumulate)  # type: ignore
        epochs = [loader for _ in epochs]
    planned = max_steps if planned is None else planned
    session.begin([optimizer], total_steps=planned, steps_per_epoch=steps_per_epoch, clips_gradients=clip > 0)
    model.train()

    def clip_each_student() -> None:
        for student in (model, *session.peers):
            if clip:
                torch.nn.utils.clip_grad_norm_(student.parameters(), clip)

    micro = itertools.islice((batch for epoch in epochs for batch in epoch), max_steps * accumulate)
    for index, batch in enumerate(micro, 1):
        with session.forward():
            loss = session.loss(model(**batch)["loss"]) / accumulate
        backward(session, loss)
        if index % accumulate == 0:
            update(session, optimizer, clip_each_student)
    session.finish()
    return Result(weights_of(model), session.receipt().values, model=model)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the loops of accelerate and Fabric; `save_at_batches` counts micro-batches."""

    accumulate: int = 1
    dropout: float = 0.0
    shuffle: bool = False
    save_every: int | None = None
    save_at_batches: tuple[int, ...] = ()
    max_steps: int = NUM_STEPS
    resume: Path | None = None
    batch_norm: bool = True
    batch: int = BATCH
    optim: str = "adamw_torch"
    plugin: bool = True

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> tuple[LoopOptions, dict[str, Any]]:
        """Return these options, and the others: those of the library."""
        own = {each.name for each in fields(cls)}
        taken = cls(**{name: value for name, value in options.items() if name in own})
        return taken, {name: value for name, value in options.items() if name not in own}

    def parts(self, recipe: Any) -> tuple[Any, Any, Any]:
        """Return model, optimizer and loader."""
        model = make_net(self.dropout, batch_norm=self.batch_norm, recipe=recipe)
        loader = DataLoader(train_examples(), batch_size=self.batch // self.accumulate, shuffle=self.shuffle)  # type: ignore[arg-type]
        return model, _optimizer(self.optim, model.parameters()), loader

    def save_at(self, done: int, seen: int, complete: bool) -> int | None:
        """Return under which number a checkpoint is kept after so many steps and micro-batches; None: there is none."""
        if seen in self.save_at_batches:
            return seen
        return done if self.save_every and complete and done % self.save_every == 0 else None


def run_accelerate(recipe: Any, folder: Path, **options: Any) -> Result:
    """A loop as accelerate's users write it, checkpoints of `save_state` by step or by micro-batch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_eff import prepare

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    asked, more = LoopOptions.taken_from(options)
    more |= {"cpu": DEVICE.type == "cpu", "gradient_accumulation_steps": asked.accumulate}
    accelerator = Accelerator(project_dir=folder, **more)
    model, optimizer, loader = prepared = asked.parts(recipe)
    if asked.plugin:
        model, optimizer, loader = prepare(accelerator, *prepared, recipe=recipe, total_steps=asked.max_steps)
    else:
        model, optimizer, loader = accelerator.prepare(*prepared)
    done, seen, saved = 0, 0, {}
    if asked.resume:
        accelerator.load_state(str(asked.resume))
        done, seen = (int(number) for number in asked.resume.name.split("-")[1:])
    while done < asked.max_steps:
        model.train()
        left = accelerator.skip_first_batches(loader, seen % len(loader)) if seen % len(loader) else loader
        for inputs in left:
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            seen, done = seen + 1, done + accelerator.sync_gradients
            if (at := asked.save_at(done, seen, accelerator.sync_gradients)) is not None:
                saved[at] = path = Path(folder) / f"state-{done}-{seen}"
                accelerator.save_state(str(path))
            if done == asked.max_steps:
                break
    net = accelerator.unwrap_model(model)
    if accelerator.num_processes == 1:
        accelerator.end_training()  # it ends the process group, which the next run needs
    receipt = _receipt(folder)
    return Result(weights_of(net), receipt, saved, net)


def run_fabric(recipe: Any, folder: Path, **options: Any) -> Result:
    """A loop as Fabric's users write it, with random numbers and the place in the data in its own checkpoints."""
    from lightning_fabric import Fabric

    from lightning_eff import setup

    asked, more = LoopOptions.taken_from(options)
    fabric = Fabric(accelerator=DEVICE.type, **{"devices": 1, **more})
    fabric.launch()
    model, optimizer, loader = asked.parts(recipe)
    accumulate = asked.accumulate
    if asked.plugin:
        rows = DataLoader(loader.dataset, batch_size=loader.batch_size)
        plan = {"total_steps": asked.max_steps, "accumulate": accumulate, "steps_per_epoch": len(rows) // accumulate}
        model, optimizer = setup(fabric, model, optimizer, recipe=recipe, calibration=rows, **plan)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    seen, saved = 0, {}
    if asked.resume:
        state = {"model": model, "optimizer": optimizer, "seen": 0, "random": rng_state()}
        fabric.load(asked.resume, state)
        seen = state["seen"]
        set_rng_state(state["random"])
    model.train()
    while seen < asked.max_steps * accumulate:
        for inputs in itertools.islice(loader, seen % len(loader), None):
            seen += 1
            goes_on = seen % accumulate != 0
            with fabric.no_backward_sync(model, enabled=goes_on):
                fabric.backward(model(**inputs)["loss"] / accumulate)
            if not goes_on:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
            done = seen // accumulate
            if (at := asked.save_at(done, seen, not goes_on)) is not None:
                saved[at] = path = Path(folder) / f"{seen}.ckpt"
                state = {"model": model, "optimizer": optimizer, "seen": seen, "random": rng_state()}
                fabric.save(path, state)
            if done == asked.max_steps and not goes_on:
                break
    fabric.save(Path(folder) / "end.ckpt", {"model": model})
    receipt = _receipt(folder)
    return Result(weights_of(model.module), receipt, saved, model.module)


def prepared_loop(
    kind: str, recipe: Any, folder: Path, parts: tuple[Any, Any, Any], total_steps: int = NUM_STEPS
) -> tuple[Any, Any, Any, Any]:
    """Return an Accelerator, or a Fabric, and the model, optimizer and loader that it has prepared with a recipe."""
    model, optimizer, loader = parts
    if kind == "accelerate":
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        from hf_eff import prepare

        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        accelerator = Accelerator(project_dir=folder, cpu=True)
        return accelerator, *prepare(accelerator, *parts, recipe=recipe, total_steps=total_steps)
    from lightning_fabric import Fabric

    from lightning_eff import setup

    fabric = Fabric(accelerator="cpu", devices=1)
    plan = {"total_steps": total_steps, "steps_per_epoch": len(loader), "calibration": loader}
    model, optimizer = setup(fabric, model, optimizer, recipe=recipe, **plan)
    return fabric, model, optimizer, fabric.setup_dataloaders(loader)


def hf_trainer(
    recipe: Any,
    folder: Path,
    *,
    accumulate: int = 1,
    dropout: float = 0.0,
    shuffle: bool = False,
    save_every: int | None = None,
    max_steps: int = NUM_STEPS,
    optim: str = "adamw_torch",
    batch_norm: bool = True,
    batch: int = BATCH,
    callbacks: Any = (),
    plugin: bool = True,
    **more: Any,
) -> Any:
    """A Trainer with the recipe attached (`plugin=False`: a bare one)."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    from hf_eff import attach

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else self.train_dataset
            return super()._get_train_sampler(*args, **kwargs) if shuffle else SequentialSampler(data)

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if optim == "schedule_free":
                self.optimizer = self.optimizer or _optimizer(optim, self.model.parameters())
            return super().create_optimizer(*args, **kwargs)

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "per_device_train_batch_size": batch // accumulate,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch" if optim == "schedule_free" else optim,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "save_strategy": "steps" if save_every else "no",
        "save_steps": save_every or 500,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": DEVICE.type == "cpu",
        "tf32": None if DEVICE.type == "cpu" else False,  # on by default there, which loops and Lightning leave off
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    trainer = InOrder(
        model=make_net(dropout, batch_norm=batch_norm, recipe=recipe),
        args=TrainingArguments(**(options | more)),
        train_dataset=train_examples(),
        eval_dataset=eval_examples(),
        callbacks=list(callbacks),
    )
    if plugin:
        attach(trainer, recipe)
    return trainer


def run_hf(recipe: Any, folder: Path, *, resume: Path | str | bool | None = None, **options: Any) -> Result:
    """Train with the Hugging Face Trainer."""
    if "soup" in recipe:
        options.setdefault("save_every", 2)
    trainer = hf_trainer(recipe, folder, **options)
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    receipt = _receipt(folder)
    saved = {int(path.name.split("-")[1]): path for path in Path(folder).glob("checkpoint-*")}
    return Result(weights_of(trainer.model), receipt, saved, trainer.model)


def lightning_module(
    dropout: float = 0.0, batch_norm: bool = True, optim: str = "adamw_torch", recipe: tuple[str, ...] = ()
) -> Any:
    """The same net in a LightningModule."""
    import pytorch_lightning as pl

    return _module_class(pl)(dropout, batch_norm, optim, recipe)


def _module_class(pl: Any) -> Any:
    class DigitsModule(pl.LightningModule):
        def __init__(self, dropout: float, batch_norm: bool, optim: str, recipe: tuple[str, ...]) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = make_net(dropout, batch_norm=batch_norm, recipe=recipe)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("eval_loss", self.net(**batch)["loss"], batch_size=len(batch["labels"]))

        def configure_optimizers(self) -> Any:
            return _optimizer(self.hparams["optim"], self.parameters())

    return DigitsModule


def run_lightning(
    recipe: Any,
    folder: Path,
    *,
    accumulate: int = 1,
    dropout: float = 0.0,
    shuffle: bool = False,
    save_every: int | None = None,
    save_at_batches: tuple[int, ...] = (),
    max_steps: int = NUM_STEPS,
    resume: Path | None = None,
    batch_norm: bool = True,
    batch: int = BATCH,
    optim: str = "adamw_torch",
    plugin: bool = True,
    callbacks: Any = (),
    seed: int | None = None,
    **more: Any,
) -> Result:
    """Train with Lightning; `seed` is of torch's generator."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from lightning_eff import EffCallback
    from lightning_eff.pytorch import LossScalingPrecision

    if seed is not None:
        torch.manual_seed(seed)
    recipe = Recipe.from_dict(recipe)
    if "distill" in recipe and recipe["distill"].student is None:  # type: ignore[attr-defined]
        partial = {"allow_partial": recipe.allow_partial}
        recipe = Recipe.from_dict({**recipe, **partial, "distill": _with_student(recipe["distill"])})
    if "soup" in recipe:
        save_every = save_every or 2
    plugins = []
    if "loss_scale" in recipe and plugin:
        options = {key: value for key, value in recipe["loss_scale"].to_dict().items()}
        plugins = [LossScalingPrecision(precision="32-true", **options)]
        others = {key: config for key, config in recipe.items() if key != "loss_scale"}
        recipe = Recipe(others, allow_partial=recipe.allow_partial)
    saved: dict[int, Path] = {}

    class SaveAt(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            if done in save_at_batches:
                path = Path(folder) / f"batch-{done}.ckpt"
                trainer.save_checkpoint(path)
                saved[done] = path

    hooks: list[Any] = [*callbacks, SaveAt()]
    if save_every:
        hooks.append(
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_every, save_top_k=-1, save_last=False)
        )
    if plugin:
        hooks.insert(0, EffCallback(recipe))
    module = lightning_module(dropout, batch_norm, optim, tuple(recipe))
    trainer = pl.Trainer(
        **(
            {
                "max_steps": max_steps,
                "accelerator": DEVICE.type,
                "devices": 1,
                "accumulate_grad_batches": accumulate,
                "gradient_clip_val": CLIP,
                "callbacks": hooks,
                "plugins": plugins,
                "logger": False,
                "enable_checkpointing": bool(save_every),
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": str(folder),
                "num_sanity_val_steps": 0,
                "use_distributed_sampler": False,
                "limit_val_batches": 5 if "soup" in recipe else 0,
                "check_val_every_n_epoch": 1,
            }
            | more
        )
    )
    data: Any = train_examples()
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        # Lightning's own distributed sampler shuffles; here ranks take turns by batch, as accelerate lets them.
        ours = [i for i in range(len(data)) if i // batch % world == int(os.environ["RANK"])]
        data = [data[i] for i in ours]
    train = DataLoader(data, batch_size=batch // accumulate, shuffle=shuffle)
    validate = DataLoader(eval_examples(), batch_size=BATCH)  # type: ignore[arg-type]
    receipt_file = Path(folder) / "eff_receipt.json"
    with contextlib.suppress(FileNotFoundError), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(receipt_file))  # a run leaves none of itself among checkpoints
        trainer.fit(module, train, validate, ckpt_path=str(resume) if resume else None)
    receipt = _receipt(folder)
    saved |= {int(path.stem.split("=")[1]): path for path in Path(folder).glob("step=*.ckpt")}
    return Result(weights_of(module.net), receipt, saved, module.net)


def _with_student(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.to_dict()} | {"student": "net"}


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint that an exact resume must reproduce."""
    if checkpoint.is_dir():
        (weights,) = checkpoint.glob("*model.safetensors")  # or of adapters alone
        state: dict[str, Any] = {"model": load_file(weights)}
        for name in ("optimizer.pt", "scheduler.pt", "scaler.pt"):
            if (checkpoint / name).is_file():
                state[name] = torch.load(checkpoint / name, weights_only=True)
        state["rng"] = torch.load(checkpoint / "rng_state.pth", weights_only=False)
        if (checkpoint / "eff_state.safetensors").is_file():
            from shared_core.engine.saving.state_file import load_state

            state["eff"] = _without_memory(load_state(checkpoint))
        return state
    content = torch.load(checkpoint, weights_only=True)
    ours = {key: value for key, value in content["callbacks"].items() if "ModelCheckpoint" not in key}
    plain = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "eff_raw_state_dict")
    state = {key: content[key] for key in plain if key in content}
    precision = {key: value for key, value in content.items() if "Precision" in key}
    return _without_memory(state | {"callbacks": ours, "precision": precision})


def _without_memory(state: Any) -> Any:
    """Return the state without what a GPU had allocated when figures were logged: a resumed run holds more or less."""
    if isinstance(state, dict):
        return {key: _without_memory(value) for key, value in state.items() if not str(key).startswith("memory/")}
    return [_without_memory(value) for value in state] if isinstance(state, list) else state


def difference(first: Any, second: Any, path: str = "") -> str | None:
    """Where two nested states differ, bit for bit; None where they are equal."""
    if isinstance(first, Tensor):
        same = isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first.cpu(), second.cpu())
        return None if same else path
    if isinstance(first, dict):
        if not isinstance(second, dict) or list(map(str, first)) != list(map(str, second)):
            return f"{path}: keys {sorted(map(str, set(first) ^ set(second)))}"
        return next((found for key in first if (found := difference(first[key], second[key], f"{path}/{key}"))), None)
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return path
        pairs = enumerate(zip(first, second, strict=True))
        return next((found for i, (a, b) in pairs if (found := difference(a, b, f"{path}/{i}"))), None)
    if isinstance(first, float) and isinstance(second, float) and first != first and second != second:
        return None  # of a step whose gradients are not finite
    equal = first == second
    return None if (bool(equal) if not hasattr(equal, "all") else bool(equal.all())) else path


TRAINERS: dict[str, Callable[..., Result]] = {"hf": run_hf, "lightning": run_lightning}

# Four steps an epoch: 2 and 6 lie inside an epoch and on schedule edges, 4 on an epoch's edge, 1 before anything began.
STOPS = (1, 2, 4, 5, 6)


def copied(whole: Result, stop: int, folder: Path) -> Path:
    """The run's folder as it was when it stopped: a soup at the end takes its ingredients from there."""
    folder.mkdir()
    for step, path in whole.checkpoints.items():
        if step <= stop:
            shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copy(path, folder / path.name)
    return folder / whole.checkpoints[stop].name


def assert_resumes(
    run: Callable[..., Result],
    recipe: Callable[[], Any],
    folder: Path,
    stops: Iterable[int] = STOPS,
    *,
    save_every: int = 1,
    **options: Any,
) -> Result:
    """Check that a run stopped after each of these steps goes on bit for bit; return the one that never stopped."""
    options = {"save_every": save_every, "seed": 3, **options}
    whole = run(recipe(), folder / "whole", **options)
    for stop in stops:
        again = run(recipe(), folder / f"from{stop}", resume=copied(whole, stop, folder / f"from{stop}"), **options)
        for step in {stop + save_every, max(whole.checkpoints)}:
            found = difference(saved_state(whole.checkpoints[step]), saved_state(again.checkpoints[step]))
            assert found is None, f"stopped at {stop}, at {step}: {found}"
        found = difference(whole.weights, again.weights)
        assert found is None, f"stopped at {stop}: {found}"
    return whole
