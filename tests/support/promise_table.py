"""The table of the promises: one row a technique, its tiny recipe, and what it is exempt from by its nature."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shared_core.engine.checks.compatibility import is_allowed, refusal
from shared_core.engine.recipe import Recipe
from shared_core.lottery_ticket import Ticket, write_ticket
from shared_core.pruning import PruneConfig
from shared_core.pruning.targets import find_targets

NUM_STEPS = 8
BATCH = 8
DEVICE = torch.device(os.environ.get("EFF_TEST_DEVICE", "cpu"))
"""Where the runs of the table train: `make test-gpu` says cuda."""


@dataclass(frozen=True)
class Row:
    key: str
    options: dict[str, Any]
    exempt: frozenset[str] = field(default_factory=frozenset)
    needs_teacher: bool = False
    needs_ticket: bool = False
    beside: dict[str, Any] = field(default_factory=dict)
    """Sections of other techniques that belong to the same recipe."""
    in_16_bit: bool = False
    """Whether the model is loaded in bf16; every recipe with such a row then runs in bf16."""
    on_gradients: bool = False
    """Whether it works on gradients before the step. Without that, what it does after each step is all it does."""
    takes_batch_norm: bool = True
    """Whether the model may have BatchNorm; a recipe with a row that says no runs without."""

    def recipe(self) -> dict[str, Any]:
        options = dict(self.options)
        if self.needs_teacher:
            options["teacher"] = make_teacher()
        if self.needs_ticket:
            options |= make_ticket(options.get("rewind", "weights"), options.get("rewind_to", 0))
        return {self.key: options} | self.beside


TECHNIQUES = {
    row.key: row
    for row in (
        Row("prune", {"sparsity": 0.6, "schedule": "cubic", "begin": 1, "end": 6, "every": 2}),
        Row("qat", {"scheme": "int8", "begin": 2, "freeze_observers": 6}),
        Row("cluster", {"bits": 3, "begin": 6, "min_size": 64}, on_gradients=True),
        Row("distill", {"temperature": 2.0, "alpha": 0.4}, needs_teacher=True),
        Row("loss_scale", {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 3}, on_gradients=True),
        Row("average", {"kind": "ema", "decay": 0.7, "begin": 2, "every": 2}),
        # A soup looks at saved checkpoints after training: no step of training is changed by it.
        Row(
            "soup",
            {"kind": "greedy", "metric": "eval_loss"},
            exempt=frozenset({"accumulation", "two_processes"}),
        ),
        # The scales of a product are of its own micro-batch, and so of one process's part of it: values are rounded to
        # other FP8 numbers when the batch is cut otherwise. What must be equal, the histories, tests/shared_core tests.
        Row(
            "fp8",
            {"recipe": "delayed", "amax_history": 3, "include": ["first"]},
            exempt=frozenset({"accumulation", "two_processes"}),
        ),
        # A forward in bf16 rounds sums over the micro-batch, and DDP averages bf16 gradients: weights agree to a few
        # ulps of bf16, not to 1e-6. What must be equal, tests/shared_core tests.
        Row(
            "primary_weights",
            {"kind": "stochastic_rounding"},
            exempt=frozenset({"accumulation", "two_processes"}),
            in_16_bit=True,
            on_gradients=True,
        ),
        Row("matmul", {"precision": "high"}),
        Row("checkpointing", {"policy": "block", "include": ["*norm", "*dropout", "*hidden"]}),
        Row("lora", {"rank": 2, "base": "nf4", "save": "merged"}),
        Row("activations", {"pack": "exact", "min_size": 32}),
        # Over newly drawn weights masks hold from the first step.
        Row("lottery", {"control": "random_reinit"}, needs_ticket=True, on_gradients=True),
        # Of full rank, which FP8 can multiply. A checkpoint folder of Hugging Face holds the factors.
        Row(
            "low_rank",
            {"rank": 16, "force": True, "merge": True},
            exempt=frozenset({"plain_hf_checkpoints", "plain_accelerate_checkpoints", "plain_fabric_checkpoints"}),
        ),
        # Each process must hold all data, and the table's Lightning run gives each its own: two processes are tested
        # in tests/shared_core and, with the Hugging Face Trainer, in tests/promises.
        Row(
            "dp",
            {"noise_multiplier": 0.5, "max_grad_norm": 2.0, "seed": 0},
            exempt=frozenset({"two_processes"}),
            takes_batch_norm=False,
            on_gradients=True,
        ),
    )
}
# Other options of techniques that keep other state: resumed and compared as well, not paired.
GROWING = {"sparsity": 0.5, "begin": 1, "end": 6, "every": 2}
VARIANTS = {
    "prune-taylor": Row(
        "prune", {"criterion": "taylor", "cost": "flops", "schedule": "iterative", **GROWING}, on_gradients=True
    ),
    "prune-movement": Row(
        "prune", {"criterion": "movement", "regularizer": "weight_decay", **GROWING}, on_gradients=True
    ),
    "prune-2:4": Row(
        "prune",
        {"granularity": "n_m", "sr_ste": 2e-4, **GROWING, "schedule": "one_shot", "every": 1},
        on_gradients=True,
    ),
    "prune-rigl": Row(
        "prune", {"dynamic": "rigl", "criterion": "random", **GROWING, "schedule": "one_shot"}, on_gradients=True
    ),
    "prune-neuron": Row("prune", {"granularity": "neuron", "criterion": "fisher", **GROWING}, on_gradients=True),
    "prune-overrides": Row(
        "prune",
        {"criterion": "movement", "overrides": {"last": {"sparsity": 0.25}, "first": {"sparsity": 0}}, **GROWING},
        on_gradients=True,
    ),
    "distill-self": Row("distill", {"teacher": "self", "alpha": 0.3}),
    "distill-ema": Row("distill", {"teacher": "ema", "ema_decay": 0.5, "divergence": "jsd", "alpha_end": 0.1}),
    "distill-mutual": Row("distill", {"teacher": "mutual", "peers": 3, "divergence": "jsd"}),
    "distill-hidden": Row("distill", {"hidden": ["*hidden=hidden"], "confidence": 0.1}, needs_teacher=True),
    "distill-chunked": Row("distill", {"chunked": True, "budget_mib": 0.001, "vocab_size": 9}, needs_teacher=True),
    "qat-pair": Row(
        "qat", {"weights": "mxfp4", "inputs": "mxfp8", "overrides": {"last": {"scheme": "W4A8"}}, "begin": 2}
    ),
    "qat-lsq": Row(
        "qat", {"scheme": "int8", "range": "lsq_plus", "begin": 2, "freeze_observers": 6}, on_gradients=True
    ),
    "qat-xnor": Row("qat", {"scheme": "xnor_net", "skip": ["last"], "begin": 2}),
    "qat-int16": Row("qat", {"scheme": "int16", "begin": 2, "freeze_observers": 6}),
    "qat-kl": Row("qat", {"scheme": "int8", "range": "kl", "begin": 2, "freeze_observers": 6}),
    "qat-fp8": Row("qat", {"scheme": "fp8_static", "begin": 2, "freeze_observers": 6}),
    "qat-int4": Row("qat", {"scheme": "int8_dynamic_int4_weight", "begin": 3, "rounding": "stochastic"}),
    "fp8-int16": Row("fp8", {"recipe": "int16", "include": ["first"]}),
    "lora-adapters": Row("lora", {"rank": 2}),
    "lora-int8": Row("lora", {"rank": 2, "base": "int8", "save": "merged", "requantize": True}),
    "lora-qat": Row(
        "lora",
        {"rank": 2, "save": "merged"},
        beside={"qat": {"scheme": "int8", "begin": 2, "freeze_observers": 6}},
    ),
    "lora-qat-lsq": Row(
        "lora",
        {"rank": 2, "save": "merged"},
        beside={"qat": {"scheme": "int8", "range": "lsq", "weight_bits": 4}},
        on_gradients=True,
    ),
    "ticket-late": Row("lottery", {"rewind_to": 2}, needs_ticket=True, on_gradients=True),
    "ticket-rate": Row("lottery", {"rewind_to": 2, "rewind": "learning_rate"}, needs_ticket=True, on_gradients=True),
    "ticket-tuned": Row("lottery", {"rewind_to": 2, "rewind": "none"}, needs_ticket=True, on_gradients=True),
    "average-last": Row("average", {"kind": "last_k", "k": 2, "every": 3}),
    # Draws of its own for each micro-batch and process; their mean tests/shared_core tests.
    "activations-int8": Row(
        "activations",
        {"pack": "int8", "min_size": 32, "group_size": 16},
        exempt=frozenset({"accumulation", "two_processes"}),
    ),
    "primary-copy": Row("primary_weights", {"kind": "fp32_copy"}, in_16_bit=True, on_gradients=True),
}
# Traced, or scored by hooks: what several processes must find alike.
STRUCTURED = {
    "prune-units": Row("prune", {"granularity": "neuron", "scope": "global", "cost": "flops", **GROWING}),
    "prune-units-taylor": Row("prune", {"granularity": "neuron", "criterion": "taylor", **GROWING}),
    "prune-units-neuron_taylor": Row("prune", {"granularity": "neuron", "criterion": "neuron_taylor", **GROWING}),
    "prune-channels": Row("prune", {"granularity": "channel", "criterion": "fisher", **GROWING}),
    "prune-wanda": Row("prune", {"criterion": "wanda", **GROWING}),
}
EVERYTHING = tuple(TECHNIQUES)
# The most that one run can hold: a row joins unless an earlier one refuses it.
TOGETHER: tuple[str, ...] = ()
for _key in EVERYTHING:
    _alone = TECHNIQUES[_key].in_16_bit or any(refusal(_key, other) for other in TOGETHER)
    TOGETHER += () if _alone else (_key,)
FEW_RUNS = (TOGETHER, *((key,) for key in EVERYTHING if key not in TOGETHER))
"""Every technique, in as few runs as can hold them."""


def recipe_of(*keys: str) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    for key in keys:
        recipe |= (TECHNIQUES | VARIANTS | STRUCTURED)[key].recipe()
    return recipe


def is_refused(first: str, second: str) -> bool:
    """Whether two rows cannot be one recipe: some pairs are refused only with certain options."""
    return bool(refusal(first, second)) and not is_allowed(first, second, Recipe.from_dict(recipe_of(first, second)))


class DigitsNet(nn.Module):
    """Conv, BatchNorm, dropout, two linear layers: every kind of state that a resume can lose."""

    def __init__(self, dropout: float = 0.0, width: int = 16, batch_norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(4) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(256, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = torch.relu(self.norm(self.conv(x.to(self.head.bias.dtype)))).flatten(1)
        logits = self.head(self.dropout(torch.relu(self.hidden(features))))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def make_net(dropout: float = 0.0, *, seed: int = 0, batch_norm: bool = True, recipe: Iterable[str] = ()) -> DigitsNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = DigitsNet(dropout, batch_norm=batch_norm and all(TECHNIQUES[key].takes_batch_norm for key in recipe))
    return net.bfloat16() if any(TECHNIQUES[key].in_16_bit for key in recipe) else net


def make_teacher() -> DigitsNet:
    return make_net(seed=7)


@functools.cache
def _ticket_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="eff-ticket-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def make_ticket(rewind: str, step: int) -> dict[str, str]:
    """A ticket that keeps half of the weights, and an output folder without a finished run, as options."""
    folder, generator, found_in = _ticket_folder(), torch.Generator().manual_seed(0), make_net(seed=7)
    once = {name for name, _ in [*found_in.named_parameters(), *found_in.named_buffers()]}  # tied tensors too
    weights = {name: value for name, value in found_in.state_dict().items() if name in once}
    pruned = find_targets(found_in, PruneConfig(sparsity=0.5)).modules
    masks = {name: torch.rand(weights[name].shape, generator=generator) < 0.5 for name in pruned}
    rates = ((0.005,),) if rewind == "none" else ()
    path = write_ticket(folder / f"{rewind}.safetensors", Ticket(masks, weights, step, rewind, rates))
    (folder / "out" / "round.json").unlink(missing_ok=True)
    return {"ticket": str(path), "out": str(folder / "out")}


def examples(start: int, count: int) -> list[dict[str, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[start : start + count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return [{"x": image, "labels": torch.tensor(int(label))} for image, label in zip(x, labels[start:], strict=False)]


def train_examples(accumulate: int = 1) -> list[dict[str, Tensor]]:
    # Four optimizer steps an epoch, so that NUM_STEPS ends the second one: edges of epochs lie inside the run.
    return examples(0, 4 * BATCH)


def eval_examples() -> list[dict[str, Tensor]]:
    return examples(1000, 40)


PAIRS = [pair for pair in itertools.combinations(EVERYTHING, 2) if not is_refused(*pair)]

PRUNE = {"prune": {"sparsity": 0.6, "begin": 1, "end": 6, "every": 1, "schedule": "linear", "criterion": "random"}}
REACHED_AT = pytest.mark.parametrize(
    ("recipe", "first"),
    [
        (PRUNE, 6),
        ({"cluster": {"bits": 2, "begin": 5, "min_size": 64}}, 5),
        ({"average": {"kind": "swa", "begin": 4}}, 4),
        ({"qat": {"scheme": "int8", "begin": 3, "freeze_observers": 6}}, 6),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
"""Recipes of `NUM_STEPS` steps with the first step after which the model holds what they ask for."""
