"""The table of the promises: one row a technique, its tiny recipe, and what it is exempt from by its nature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shared_core.compatibility import refusal

NUM_STEPS = 8
BATCH = 8


@dataclass(frozen=True)
class Row:
    key: str
    options: dict[str, Any]
    exempt: frozenset[str] = field(default_factory=frozenset)
    needs_teacher: bool = False
    in_16_bit: bool = False
    """Whether the model is loaded in bf16; every recipe with such a row then runs in bf16."""

    def recipe(self) -> dict[str, Any]:
        options = dict(self.options)
        if self.needs_teacher:
            options["teacher"] = make_teacher()
        return {self.key: options}


TECHNIQUES = {
    row.key: row
    for row in (
        Row("prune", {"sparsity": 0.6, "schedule": "cubic", "begin": 1, "end": 6, "every": 2}),
        Row("qat", {"scheme": "int8", "begin": 2, "freeze_observers": 6}),
        Row("distill", {"temperature": 2.0, "alpha": 0.4}, needs_teacher=True),
        Row("loss_scale", {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 3}),
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
        ),
        Row("matmul", {"precision": "high"}),
        Row("lora", {"rank": 2}),
    )
}
# Other options of techniques that keep other state: resumed and compared as well, not paired.
VARIANTS = {
    "qat-lsq": Row("qat", {"scheme": "int8", "range": "lsq_plus", "begin": 2, "freeze_observers": 6}),
    "qat-kl": Row("qat", {"scheme": "int8", "range": "kl", "begin": 2, "freeze_observers": 6}),
    "qat-int4": Row("qat", {"scheme": "int8_dynamic_int4_weight", "begin": 3, "rounding": "stochastic"}),
    "fp8-int16": Row("fp8", {"recipe": "int16", "include": ["first"]}),
    "lora-int8": Row("lora", {"rank": 2, "base": "int8", "requantize": True}),
    "primary-copy": Row("primary_weights", {"kind": "fp32_copy"}, in_16_bit=True),
}
EVERYTHING = tuple(TECHNIQUES)
PAIRS = [(a, b) for i, a in enumerate(EVERYTHING) for b in EVERYTHING[i + 1 :] if not refusal(a, b)]
# The most that one run can hold: a row joins unless an earlier one refuses it.
TOGETHER: tuple[str, ...] = ()
for _key in EVERYTHING:
    _alone = TECHNIQUES[_key].in_16_bit or any(refusal(_key, other) for other in TOGETHER)
    TOGETHER += () if _alone else (_key,)


def recipe_of(*keys: str) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    for key in keys:
        recipe |= (TECHNIQUES | VARIANTS)[key].recipe()
    return recipe


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
        features = torch.relu(self.norm(self.conv(x.to(self.head.weight.dtype)))).flatten(1)
        logits = self.head(self.dropout(torch.relu(self.hidden(features))))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


def make_net(dropout: float = 0.0, *, seed: int = 0, batch_norm: bool = True, recipe: Iterable[str] = ()) -> DigitsNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = DigitsNet(dropout, batch_norm=batch_norm)
    return net.bfloat16() if any(TECHNIQUES[key].in_16_bit for key in recipe) else net


def make_teacher() -> DigitsNet:
    return make_net(seed=7)


def examples(start: int, count: int) -> list[dict[str, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[start : start + count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return [{"x": image, "labels": torch.tensor(int(label))} for image, label in zip(x, labels[start:], strict=False)]


def train_examples(accumulate: int = 1) -> list[dict[str, Tensor]]:
    # Four optimizer steps an epoch, so that NUM_STEPS ends the second one: edges of epochs lie inside the run.
    return examples(0, 4 * BATCH)


def eval_examples() -> list[dict[str, Tensor]]:
    return examples(1000, 40)
