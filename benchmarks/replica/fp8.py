"""A character model trained with every FP8 recipe, beside bf16 and beside FP8 without scales.

The products of all linear layers inside the blocks run in the recipe's format, forward and backward; embeddings and
the head stay in bf16, as everything does under autocast. Gradients of a mean over a thousand tokens are far below what
e5m2 can hold, so that casting them without a scale must cost something: else the test would have no teeth.
"""

from __future__ import annotations

import functools
import math
import sysconfig
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row
from replicas import Runs, main, mean, spread
from torch import Tensor, nn

from shared_core import Recipe, Session
from shared_core.errors import EffError
from shared_core.fp8 import Fp8Config
from shared_core.loss_scaling import LossScaling

SEEDS, STEPS, BATCH, LENGTH = 3, 120, 16, 64
WIDTH, DEPTH, HEADS = 64, 2, 4
LEARNING_RATE, WARMUP = 3e-3, 30
SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))  # 96, what tensor cores can multiply
VALIDATION = 512  # sequences

WITHIN, WORSE = 0.3, 5.0  # percent of bf16's loss
FOUR_BIT = ("mxfp4", "nvfp4")  # nothing was promised for them
PROTOTYPE = {"tensorwise": "+0.02 %", "rowwise": "-0.01 %", "s2fp8": "-0.04 %"}
# what a recipe needs beside itself
COMPANIONS: dict[str, dict[str, Any]] = {"hfp8": {"loss_scale": {"kind": "dynamic", "format": "fp8_e5m2"}}}


class Block(nn.Module):
    """Attention over the past, then two layers, each after a normalization and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(len(SYMBOLS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(SYMBOLS))

    def forward(self, text: Tensor) -> Tensor:
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def inner_layers(model: CharacterModel) -> list[str]:
    return [name for name, module in model.named_modules() if name.startswith("blocks.") and type(module) is nn.Linear]


class UnscaledProduct(torch.autograd.Function):
    """A linear layer's three products on values cast to e4m3 (gradients: e5m2) as they are, saturating."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        a, b = cast(x, torch.float8_e4m3fn), cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(a, b)
        return (a @ b.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gradient = cast(grads[0], torch.float8_e5m2)
        return (gradient @ b).to(grads[0].dtype), gradient.t() @ a


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype).float()


class UnscaledLinear(nn.Linear):
    """A stock linear layer, its class changed."""

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, self.in_features).to(torch.bfloat16)
        product: Tensor = UnscaledProduct.apply(flat, self.weight)
        return (product + self.bias.to(product.dtype)).view(*input.shape[:-1], self.out_features)


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the top-level modules of Python's own library as symbols: one file in four is for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sides: tuple[list[str], list[str]] = ([], [])
    for index, file in enumerate(files):
        sides[index % 4 == 3].append(file.read_text(encoding="utf-8", errors="replace"))
    numbers = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    train, validation = (torch.tensor([numbers.get(c, numbers["?"]) for c in "".join(side)]) for side in sides)
    return train, validation


def sequences(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return LENGTH symbols from each start, and those that follow each of them."""
    windows = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, bf16: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(inputs)
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


def train(seed: int, steps: int, recipe: dict[str, Any], prepare: str = "bf16") -> dict[str, Any]:
    """Train one model and return its validation loss, in the precision that it was trained in."""
    text, validation = texts()
    torch.manual_seed(seed)
    model = CharacterModel()
    names = inner_layers(model)
    if prepare == "unscaled":
        for name in names:
            model.get_submodule(name).__class__ = UnscaledLinear
    if "fp8" in recipe:
        recipe = {**recipe, "fp8": {**recipe["fp8"], "include": names}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    session = Session(Recipe.from_dict(recipe))
    session.attach(model)
    session.begin([optimizer], total_steps=steps)
    scaling = session.techniques.get("loss_scale")
    scaler = scaling.scaler if isinstance(scaling, LossScaling) else None
    generator = torch.Generator().manual_seed(seed)
    bf16 = prepare != "fp32"
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        batch = sequences(text, torch.randint(len(text) - LENGTH, (BATCH,), generator=generator))
        loss = session.loss(loss_of(model, *batch, bf16))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        session.before_step()
        if scaler is None:
            optimizer.step()
            session.after_step()
            continue
        scaler.step(optimizer)
        scaler.update()
        session.after_step(applied=not scaler.last_step_skipped)
    model.eval()
    starts = torch.linspace(0, len(validation) - LENGTH - 1, VALIDATION).long()
    with torch.no_grad(), session.swapped("evaluate"):
        parts = [loss_of(model, *sequences(validation, part), bf16).item() for part in starts.split(64)]
    report = session.techniques["fp8"].report() if "fp8" in session.techniques else {"layers": 0}
    return {"loss": mean(parts), "layers": report["layers"], "inner_layers": len(names), "skipped": session.skipped}


def recipes() -> tuple[str, ...]:
    """Return every recipe that `Fp8Config` has."""
    return typing.get_args(typing.get_type_hints(Fp8Config)["recipe"])


def measure(quick: bool, runs: Runs) -> list[Row]:
    seeds, steps = (1, 3) if quick else (SEEDS, STEPS)

    def over_seeds(name: str, **options: Any) -> list[dict[str, Any]]:
        calls: list[Callable[[], dict[str, Any]]] = [
            functools.partial(train, seed, steps, **{"recipe": {}, **options}) for seed in range(seeds)
        ]
        return [runs.of(f"{name}, seed {seed}", call) for seed, call in enumerate(calls)]

    base = [run["loss"] for run in over_seeds("bf16")]

    def beside(found: list[dict[str, Any]]) -> tuple[str, list[float]]:
        worse = [100 * (run["loss"] / loss - 1) for run, loss in zip(found, base, strict=True)]
        return f"{spread([run['loss'] for run in found], 4)}, {spread(worse, 2)} %", worse

    rows = [Row("bf16, validation loss", spread(base, 4), "+0.00 % to fp32's 2.3746 ± 0.0076")]
    told, _ = beside(over_seeds("fp32", prepare="fp32"))
    rows.append(Row("fp32, validation loss, paired difference to bf16", told))
    told, worse = beside(over_seeds("unscaled", prepare="unscaled"))
    rows.append(
        Row(
            "FP8 without scales (e4m3, e5m2 gradients): validation loss, paired difference to bf16",
            told,
            "+12.9 %",
            target=f">= {WORSE:g} % worse",
            met=mean(worse) >= WORSE,
        )
    )
    for recipe in recipes():
        promised = recipe not in FOUR_BIT
        try:
            found = over_seeds(recipe, recipe={"fp8": {"recipe": recipe}, **COMPANIONS.get(recipe, {})})
        except EffError as error:
            rows.append(Row(recipe, f"did not run: {error}", target="runs", met=False))
            continue
        told, worse = beside(found)
        everywhere = all(run["layers"] == run["inner_layers"] for run in found)
        skipped = max(run["skipped"] for run in found)
        beside_it = f", loss scaling {COMPANIONS[recipe]['loss_scale']['kind']}" if recipe in COMPANIONS else ""
        rows.append(
            Row(
                f"{recipe}{beside_it}: validation loss, paired difference to bf16",
                told + (f", {skipped} of {steps} steps skipped at most" if skipped else ""),
                PROTOTYPE.get(recipe, ""),
                target=f"within {WITHIN} %" if promised else "",
                met=everywhere and abs(mean(worse)) <= WITHIN if promised else None,
            )
        )
    return rows


if __name__ == "__main__":
    main(measure)
