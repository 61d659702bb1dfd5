"""Measure what pruning adds to a training step, in a plain loop and in Lightning, beside torch.nn.utils.prune."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from measure import (
    MIB,
    QUIET_LIGHTNING,
    Row,
    Spread,
    in_turn,
    interleaved,
    live_tensor_bytes,
    main,
    milliseconds,
    python,
    ratio,
    run_and_watch,
    share_of_copy,
)
from pytorch_lightning.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff
from shared_core import Recipe, Session
from shared_core.pruning import magnitude, prune_mask, prune_masks

PROGRAM = str(Path(__file__).with_name("pruning_program.py"))
WIDTH, DEPTH = 1024, 10
STEPS_PER_EPOCH = 20


def mlp(width: int) -> nn.Sequential:
    """Return ten linear layers: 10.5 M parameters at width 1024."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(DEPTH) for part in (nn.Linear(width, width), nn.ReLU())][:-1])
    for module in linears(model):
        # PyTorch's own start makes gradients so small here that their squares underflow, and the square root of zeros
        # in AdamW takes ten times as long (torch 2.13, CPU, unfused): it would hide what is to be measured
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]


def torch_pruned(width: int, sparsity: float) -> nn.Sequential:
    model = mlp(width)
    prune.global_unstructured([(module, "weight") for module in linears(model)], prune.L1Unstructured, amount=sparsity)
    return model


def session_on(model: nn.Module, recipe: dict[str, Any], optimizer: torch.optim.Optimizer, clip: bool) -> Session:
    session = Session(Recipe.from_dict({"prune": recipe}))
    session.attach(model)
    session.begin([optimizer], total_steps=1_000_000, clips_gradients=clip)
    return session


ONE_SHOT = {"sparsity": 0.5, "schedule": "one_shot", "begin": 0}


def step_of(
    model: nn.Module,
    batch: int,
    *,
    clip: bool = False,
    fused: bool = False,
    recipe: dict[str, Any] | None = None,
    one_pass: bool = False,
) -> Callable[[], None]:
    """Return a function that takes one training step, through a session if there is a recipe.

    Args:
        one_pass: Multiplies all gradients by a number: the least that masking them in a pass of its own can take.
    """
    inputs = torch.randn(batch, linears(model)[0].in_features)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    session = session_on(model, recipe, optimizer, clip) if recipe else None

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if session is not None:
            loss = session.loss(loss)
        loss.backward()
        if session is not None:
            session.before_step()
        if one_pass:
            torch._foreach_mul_([gradient for p in model.parameters() if (gradient := p.grad) is not None], 0.999)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if session is not None:
            session.after_step()

    return step


def by_float_masks(model: nn.Module, batch: int) -> Callable[[], None]:
    """Return a step that ends with one product of all weights by masks in float: the least that a loop can do itself.

    Gradients of pruned weights stay, so that it is wrong where gradients are clipped by norm.
    """
    step, product = step_of(model, batch), float_masks(model)

    def masked_step() -> None:
        step()
        product()

    return masked_step


def float_masks(model: nn.Module) -> Callable[[], None]:
    """Return a function that multiplies the weights by masks in float, all in one call."""
    weights = [module.weight for module in linears(model)]
    masks = [mask.float() for mask in prune_masks([weight.detach().abs() for weight in weights], 0.5)]
    return torch.no_grad()(partial(torch._foreach_mul_, weights, masks))


def plain_loop(
    batch: int, target: float | None = None, *, clip: bool = False, fused: bool = False, width: int, rounds: int
) -> Row:
    how: dict[str, Any] = {"clip": clip, "fused": fused}
    variants = {
        "plain": step_of(mlp(width), batch, **how),
        "torch": step_of(torch_pruned(width, 0.5), batch, **how),
        "ours": step_of(mlp(width), batch, **how, recipe=ONE_SHOT),
    }
    if clip:
        variants["pass"] = step_of(mlp(width), batch, **how, one_pass=True)
    else:
        variants["float"] = by_float_masks(mlp(width), batch)
    times = interleaved(variants, rounds=rounds, calls=max(64 // batch, 1), warmup=2)
    ours, peer = ratio(times, "ours", "plain"), ratio(times, "torch", "plain")
    least = ("pass", "one product of the gradients by a number") if clip else ("float", "_foreach_mul_ by float masks")
    product = f"; {least[1]} {ratio(times, least[0], 'plain').text(3)}"
    optimizer = ("fused " if fused else "") + "AdamW" + (", clipped by norm" if clip else "")
    return Row(
        f"pruning, one step at batch {batch}, {optimizer} (plain: {milliseconds(times, 'plain')})",
        milliseconds(times, "ours"),
        f"torch.nn.utils.prune {milliseconds(times, 'torch')}, {peer.text()}{product}",
        ours.text(3),
        target="" if target is None else f"<= {target:.2f}",
        met=None if target is None else ours.median <= target,
    )


def with_updates(width: int, rounds: int) -> Row:
    """Measure ten steps of which one recomputes the masks, the default of the cubic schedule."""
    recipe = {"sparsity": 0.9, "begin": 0, "end": 1_000_000, "initial_sparsity": 0.5, "every": 10}
    times = interleaved(
        {"plain": step_of(mlp(width), 16), "ours": step_of(mlp(width), 16, recipe=recipe)},
        rounds=rounds,
        calls=10,
        warmup=2,
    )
    return Row(
        "pruning at batch 16 while the masks change every 10 steps",
        milliseconds(times, "ours"),
        ratio=ratio(times, "ours", "plain").text(3),
    )


def memory(width: int) -> Row:
    empty = live_tensor_bytes()
    model = mlp(width)
    parameters = live_tensor_bytes() - empty
    optimizer = torch.optim.AdamW(model.parameters())
    session = session_on(model, ONE_SHOT, optimizer, clip=True)
    ours = live_tensor_bytes() - empty
    del model, optimizer, session
    empty = live_tensor_bytes()
    peer_model = torch_pruned(width, 0.5)
    peer = live_tensor_bytes() - empty
    del peer_model
    return Row(
        "pruning, parameters and masks",
        f"{ours / parameters:.3f} x parameters",
        f"torch.nn.utils.prune {peer / parameters:.2f} x",
        memory=f"{ours / MIB:.1f} MiB of {parameters / MIB:.1f}, peer {peer / MIB:.1f}",
        target="<= 1.26 x parameters",
        met=ours <= 1.26 * parameters,
    )


def threshold(width: int, rounds: int) -> Row:
    scores = torch.cat([magnitude(module.weight).view(-1) for module in linears(mlp(width))])
    num_pruned = round(0.5 * scores.numel())

    def by_topk() -> Tensor:
        mask = torch.ones_like(scores)
        mask[torch.topk(scores, k=num_pruned, largest=False).indices] = 0
        return mask

    if int((~prune_mask(scores, 0.5)).sum()) != num_pruned:
        raise RuntimeError("prune_mask did not prune exactly half")
    times = interleaved({"ours": lambda: prune_mask(scores, 0.5), "topk": by_topk}, rounds=rounds)
    ours, share = Spread.of([1e3 * seconds for seconds in times["ours"]]), ratio(times, "ours", "topk")
    return Row(
        f"pruning, exact mask of {scores.numel() / 1e6:.1f} M scores",
        f"{ours.text(0)} ms",
        f"torch.topk {milliseconds(times, 'topk')}",
        share.text(3) + " of topk",
        target="<= 1/15 of topk, <= 40 ms",
        met=share.median <= 1 / 15 and ours.median <= 40,
        roofline=share_of_copy(9 * scores.numel(), times["ours"]),
    )


def large_update(parameters: int) -> Row:
    """Watch a process in which all weights compete twice, the pruned ones keeping their zeros."""
    found, peak = run_and_watch(python(PROGRAM, str(parameters)))
    above, masks = peak - found["before"], 2 * found["numel"]
    return Row(
        f"pruning, new masks of {found['numel'] / 1e6:.0f} M weights under one threshold",
        f"{found['seconds'][-1]:.2f} s CPU",
        memory=f"{above / 1e6:.0f} MB above the weights at most, of these {masks / 1e6:.0f} the masks before and after",
        target="<= 1 byte a weight beside weights and masks",
        met=above - masks <= found["numel"],
    )


class FloatMasks(pl.Callback):
    """The least that a callback can do by itself: one product of all weights by masks in float, which never change."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._product = float_masks(pl_module.layers)  # type: ignore[arg-type]

    def on_train_batch_end(self, *told: Any) -> None:
        self._product()


class Timed(pl.LightningModule):
    """A module that times its second epoch, the work between epochs included, and then stops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = mlp(width)
        self.seconds = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.seconds = -time.process_time()
        elif self.current_epoch == 2:
            self.seconds += time.process_time()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 2 else None


def fit(width: int, folder: str, callback: Callable[[], pl.Callback] | None) -> float:
    """Return the CPU seconds of a step, averaged over one epoch of 20."""
    loader = DataLoader(TensorDataset(torch.randn(16 * STEPS_PER_EPOCH, width)), batch_size=16)
    trainer = pl.Trainer(
        max_epochs=3,
        default_root_dir=folder,
        **QUIET_LIGHTNING,
        callbacks=[callback()] if callback else [],
    )
    module = Timed(width)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, loader)
    return module.seconds / STEPS_PER_EPOCH


def in_lightning(width: int, rounds: int) -> Row:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    def peer() -> pl.Callback:
        return ModelPruning("l1_unstructured", amount=0.5, use_global_unstructured=True)

    def ours() -> pl.Callback:
        return lightning_eff.Pruning(
            sparsity=0.9, schedule="linear", initial_sparsity=0.5, begin=0, end=1.0, every=STEPS_PER_EPOCH
        )

    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        fixed = partial(lightning_eff.Pruning, **ONE_SHOT)
        made = {"plain": None, "peer": peer, "ours": ours, "fixed": fixed, "float": FloatMasks}
        variants = {name: partial(fit, width, folder, make) for name, make in made.items()}
        times = in_turn(variants, rounds=rounds, seconds=50.0)  # an epoch goes before each measured one
    mine, theirs, fixed_masks, product = (ratio(times, name, "plain") for name in ("ours", "peer", "fixed", "float"))
    return Row(
        f"pruning in Lightning, batch 16, new masks every {STEPS_PER_EPOCH} steps "
        f"(Trainer alone: {milliseconds(times, 'plain')})",
        milliseconds(times, "ours"),
        f"ModelPruning {milliseconds(times, 'peer')}, {theirs.text()}; masks that stay: ours {fixed_masks.text(3)}, "
        f"_foreach_mul_ by float masks {product.text(3)}",
        mine.text(3),
        target="<= 1.12",
        met=mine.median <= 1.12,
    )


def measure(quick: bool) -> list[Row]:
    width, rounds = (256, 4) if quick else (WIDTH, 15)
    return [
        # clipped first: the Hugging Face Trainer clips by default
        plain_loop(16, 1.30, clip=True, width=width, rounds=4 if quick else 25),
        plain_loop(16, 1.05, clip=True, fused=True, width=width, rounds=4 if quick else 31),
        plain_loop(16, 1.10, width=width, rounds=rounds),
        plain_loop(128, 1.03, width=width, rounds=rounds),
        with_updates(width, 3 if quick else 9),
        memory(width),
        threshold(width, 3 if quick else 9),
        large_update(10_000_000 if quick else 100_000_000),
        in_lightning(width, 2 if quick else 9),
    ]


if __name__ == "__main__":
    main(measure)
