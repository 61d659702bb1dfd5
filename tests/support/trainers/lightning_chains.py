"""Chains of kills in Lightning: a run is killed after one of its saves, goes on from that file, is killed again, ...

A kill after a save leaves the file and nothing else, so a chain is a fresh Trainer and module on each file, until one
of them reaches the end. All that it does is drawn from one seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_world import BOTH, dataset, difference, everything, fit, loader, make_trainer, module_class
from pytorch_lightning.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff import EffCallback

PRUNE = {"sparsity": 0.5, "begin": 0.1, "end": 0.6, "every": 2}
RECIPES = [
    {"prune": PRUNE},
    {"prune": PRUNE, "qat": {"scheme": "int8", "begin": 0.3, "freeze_observers": 0.9}},
    {"average": {"kind": "ema", "decay": 0.9}},
    {"prune": PRUNE, "loss_scale": {"kind": "dynamic", "init_scale": 2.0**130 / 8, "growth_interval": 3}},
]
# In a batch's forward and backward numbers are drawn, which a batch that is run again draws anew: not exact, and told.
INSIDE = ("on_before_zero_grad", "on_before_optimizer_step")
HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", *INSIDE, "on_train_batch_end",
    "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
    "on_train_epoch_end",
)  # fmt: skip
MOST_KILLS = 8


class Killed(BaseException):
    """The process is gone."""


class Events(pl.Callback):
    """What a run tells of itself, without what a resumed one tells again."""

    def __init__(self) -> None:
        self.told: dict[tuple[Any, ...], None] = {}
        self.killed: tuple[str, ...] = ()

    def tell(self, event: str, trainer: Any, *more: Any) -> None:
        self.told[event, trainer.current_epoch, trainer.global_step, *more] = None

    def on_train_epoch_start(self, trainer, module):
        self.tell("epoch starts", trainer)

    def on_train_batch_end(self, trainer, module, output, batch, index):
        logged = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.tell("batch", trainer, index, float(output["loss"]), logged, trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer, module):
        self.tell("validated", trainer, float(trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self, trainer, module):
        self.tell("epoch ends", trainer, float(trainer.callback_metrics.get("val_loss", 0)))


class Saves(pl.Callback):
    """Saves whenever one of these hooks is called."""

    def __init__(self, hooks: list[str], folder: Path) -> None:
        for hook in hooks:
            setattr(self, hook, lambda trainer, *args, hook=hook: trainer.save_checkpoint(folder / f"{hook}.ckpt"))


class Unsized(IterableDataset):
    """Data of which nobody knows how much there is."""

    def __iter__(self):
        return (dataset()[row] for row in torch.randperm(24).tolist())


class OfTwo(module_class(BOTH[0])):
    """Trains on one loader or several."""

    plateau = ""

    def training_step(self, batch, index):
        if torch.is_tensor(batch[0]):
            return super().training_step(batch, index)
        return sum(super(OfTwo, self).training_step(part, index) for part in batch)

    def configure_optimizers(self):
        both = super().configure_optimizers()
        if self.plateau:
            kind = torch.optim.lr_scheduler.ReduceLROnPlateau
            scheduler = kind(both["optimizer"], patience=0, factor=0.7, threshold=0.5)
            both["lr_scheduler"] = {"scheduler": scheduler, "interval": self.plateau, "monitor": "val_loss"}
            both["lr_scheduler"]["strict"] = False
        return both


LOADERS = {
    "shuffled": loader,
    "seeded": lambda: loader(generator=torch.Generator().manual_seed(3)),
    "unsized": lambda: DataLoader(Unsized(), batch_size=4),
    "several": lambda: CombinedLoader([DataLoader(dataset(n), 4, shuffle=True) for n in (8, 24)], "max_size_cycle"),
}


class World:
    """What one seed makes of a run: its Trainer's options, data, recipe, and where it saves."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.recipe = dice.choice(RECIPES)
        accumulate, interval = dice.choice([1, 1, 2, 4]), dice.choice([None, 1.0, 1.0, 2, 3, 0.5])
        self.data = dice.choices(list(LOADERS), [5, 1, 1, 1])[0]
        if self.data == "unsized" and isinstance(interval, float):
            interval = 1.0
        self.options: dict[str, Any] = {
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": 1.0,
            "max_epochs": 3,
        }
        if dice.random() < 0.25 or self.data == "unsized":
            self.options |= {"max_epochs": -1, "max_steps": 11 if accumulate == 1 else 5}
        elif dice.random() < 0.25:
            self.options["reload_dataloaders_every_n_epochs"] = dice.choice([1, 2])
        self.validates = interval is not None
        if self.validates:
            self.options["val_check_interval"] = interval
            if isinstance(interval, int) and dice.random() < 0.3:
                self.options["check_val_every_n_epoch"] = None
        self.plateau = dice.choice(["", "", "epoch", "step"]) if self.validates else ""
        self.others: list[tuple[Any, dict[str, Any]]] = []
        if accumulate == 1 and dice.random() < 0.2:
            self.others.append((GradientAccumulationScheduler, {"scheduling": {0: 1, 1: 3}}))
        if interval == 1.0 and dice.random() < 0.4:
            self.others.append((EarlyStopping, {"monitor": "val_loss", "patience": 1, "min_delta": 0.02}))
        self.hooks = dice.sample(HOOKS, dice.choice([1, 2, 4]))
        kinds: list[dict[str, Any]] = [
            {"every_n_train_steps": dice.choice([1, 2, 3]), "save_top_k": -1, "save_last": True},
            {"save_on_train_epoch_end": True, "save_last": True, "save_top_k": -1},
            {"save_on_train_epoch_end": False, "save_last": True, "save_top_k": -1},
            {"monitor": "train_loss", "save_top_k": 2, "save_last": True, "every_n_train_steps": 2},
        ]
        self.checkpoints = dice.choice(kinds) if dice.random() < 0.4 else None

    def __repr__(self) -> str:
        others = [kind.__name__ for kind, _ in self.others]
        saves = self.checkpoints or self.hooks
        return f"{self.options} {self.data} plateau={self.plateau} {others} {list(self.recipe)} saves={saves}"

    def run(self, folder: Path, events: Events, seed: int = 0, ckpt_path: Any = None, odds: float = 0.0) -> Any:
        """Train to the end, or until a save that is the last.

        Args:
            folder: For what is saved.
            events: Gets told.
            seed: Of weights and generators: what is not restored would show.
            ckpt_path: The file to go on from.
            odds: How likely a save is the last.
        """
        saves = [ModelCheckpoint(folder / "kept", **self.checkpoints)] if self.checkpoints else []
        callback = EffCallback(self.recipe)
        others = [kind(**options) for kind, options in self.others]
        saves = saves or [Saves(self.hooks, folder)]
        callbacks = [callback, events, *others, *saves]
        trainer = make_trainer(folder, callbacks=callbacks, enable_checkpointing=bool(self.checkpoints), **self.options)
        save = trainer.save_checkpoint

        def save_and_die(path: Any, *args: Any, **kwargs: Any) -> None:
            save(path, *args, **kwargs)
            if not callback.session.is_finished and self.dice.random() < odds:
                events.killed = (Path(path).stem,)
                Path(path).rename(folder / "left.ckpt")
                raise Killed

        trainer.save_checkpoint = save_and_die
        torch.manual_seed(seed)
        module = OfTwo()
        module.plateau = self.plateau
        fit(trainer, module, val=self.validates, seed=5 + seed, ckpt_path=ckpt_path, train=LOADERS[self.data]())
        trainer.save_checkpoint = save
        return callback, trainer, everything(trainer, module)


def chain(seed: int, folder: Path) -> dict[str, Any]:
    """Run one chain; return what differs from the run that nothing stopped, by what it is, and what it did."""
    world, whole_events, events = World(seed), Events(), Events()
    callback, trainer, whole = world.run(folder / "whole", whole_events)
    left, places = None, []
    for attempt in range(MOST_KILLS + 1):
        odds = 0.0 if attempt == MOST_KILLS else world.dice.choice([0.1, 0.3, 0.6])
        try:
            again = world.run(folder / str(attempt), events, attempt, left, odds)
            break
        except Killed:
            left = folder / str(attempt) / "left.ckpt"
            saved = torch.load(left, weights_only=True)
            place = saved["eff_resume"]["ranks"][0].get("place", {})
            places.append((saved["epoch"], saved["global_step"], *place.values(), *events.killed))
    resumed, other, end = again
    ended = [place for place in places if place[1] == world.options.get("max_steps")]  # nothing comes but the end
    differs: dict[str, Any] = {"steps": [callback.session.step, resumed.session.step]}
    for name in ("current_epoch", "global_step"):
        differs[name] = [getattr(one, name) for one in (trainer, other)]
    loops = [one.fit_loop.state_dict() for one in (trainer, other)]
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"):
        differs[name] = [state[name] for state in loops]
    differs = {name: pair for name, pair in differs.items() if name in ("steps", "global_step") or not ended}
    differs = {name: pair for name, pair in differs.items() if pair[0] != pair[1]}
    is_exact = not any(place[-1] in INSIDE for place in places)
    if not is_exact and "loss_scale" in world.recipe:
        differs.pop("steps", None)  # which steps overflow hangs on the numbers drawn
    if is_exact:
        missing = [one for one in whole_events.told if one not in events.told and not (ended and one[2] == ended[0][1])]
        extra = [one for one in events.told if one not in whole_events.told]
        differs |= {"values": difference(whole, end)} if difference(whole, end) else {}
        differs |= {"missing": missing[:3]} if missing else {}
        differs |= {"extra": extra[:3]} if extra else {}
    return {"differs": differs, "world": world, "places": places, "is_exact": is_exact, "notes": resumed.session.notes}
