"""Three small models as users train them, for the promises: a mixture of experts, a tied language model, a ResNet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import promise_drivers
import promise_table
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from shared_core.engine.recipe import Recipe

BATCH, STEPS, STEPS_PER_EPOCH = 4, 6, 4
LENGTH, VOCAB = 7, 40


def moe(dropout: float) -> nn.Module:
    """Experts in one stacked tensor, of which a batch of a few tokens leaves some without any, and a shared one."""
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=32, moe_intermediate_size=8, shared_expert_intermediate_size=16, num_experts=12,
            num_experts_per_tok=1, output_router_logits=True, attention_dropout=dropout, max_position_embeddings=16,
        )
    )  # fmt: skip


def tied(dropout: float) -> nn.Module:
    """A language model whose output layer is its embedding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=dropout, max_position_embeddings=16, tie_word_embeddings=True,
            pad_token_id=0,
        )
    )  # fmt: skip


class DigitsForImageClassification(ResNetForImageClassification):
    """Takes images in float32 whatever its own dtype."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        return super().forward(pixel_values.to(self.dtype), labels=labels, **options)


def resnet(dropout: float) -> nn.Module:
    """Convolutions and batch norm, whose buffers training moves; it has no dropout."""
    return DigitsForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
        )
    )


MODELS: dict[str, Callable[[float], nn.Module]] = {"moe": moe, "tied": tied, "resnet": resnet}


def make(name: str, dropout: float = 0.0, *, seed: int = 0, batch_norm: bool = True, recipe: Iterable[str] = ()) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = MODELS[name](dropout)
    return net.bfloat16() if any(promise_table.TECHNIQUES[key].in_16_bit for key in recipe) else net


@functools.cache
def texts(start: int, count: int) -> list[dict[str, Tensor]]:
    """Tokens that follow a rule, of lengths that differ, padded on the right."""
    rows = []
    for i in range(start, start + count):
        length = 3 + i * 5 % (LENGTH - 2)
        tokens = torch.tensor([1 + (i * 7 + j * (2 + i % 3)) % (VOCAB - 1) for j in range(LENGTH)])
        there = torch.arange(LENGTH) < length
        rows.append({
            "input_ids": tokens.where(there, 0), "attention_mask": there.long(), "labels": tokens.where(there, -100),
        })  # fmt: skip
    return rows


@functools.cache
def images(start: int, count: int) -> list[dict[str, Tensor]]:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels[start : start + count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return [
        {"pixel_values": image, "labels": torch.tensor(int(label))}
        for image, label in zip(x, labels[start:], strict=False)
    ]


def use(name: str, put: Callable[[Any, str, Any], None]) -> None:
    """Have the drivers and the table of the promises train this model."""
    data = images if name == "resnet" else texts
    for module in (promise_table, promise_drivers):
        put(module, "make_net", functools.partial(make, name))
        put(module, "NUM_STEPS", STEPS)
        put(module, "BATCH", BATCH)
    put(promise_drivers, "train_examples", lambda: data(0, STEPS_PER_EPOCH * BATCH))
    put(promise_drivers, "eval_examples", lambda: data(100, 8))


GROWING: dict[str, Any] = {"sparsity": 0.5, "begin": 1, "end": 4, "every": 1}
TAUGHT = {"temperature": 2.0, "alpha": 0.4}
RECIPES: dict[str, dict[str, Any]] = {
    "together": {
        "prune": {**GROWING, "end": 5, "every": 2},
        "qat": {"scheme": "int8", "begin": 2, "freeze_observers": 5},
        "distill": TAUGHT,
        "loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 2},
        "average": {"kind": "ema", "decay": 0.7, "begin": 2, "every": 2},
        "checkpointing": {"policy": "block"},
        "activations": {"pack": "exact", "min_size": 32},
        "matmul": {"precision": "high"},
        "soup": {"kind": "greedy", "metric": "eval_loss"},
    },
    "shared": {
        "prune": {**GROWING, "criterion": "fisher", "granularity": "neuron"},
        "cluster": {"bits": 3, "begin": 5, "min_size": 64},
        "fp8": {"recipe": "delayed", "amax_history": 3},
        "distill": {"teacher": "ema", "ema_decay": 0.5, "divergence": "jsd"},
        "average": {"kind": "last_k", "k": 2, "every": 3},
    },
    "adapted": {
        "lora": {"rank": 2, "base": "nf4", "save": "merged"},
        "activations": {"pack": "int8", "min_size": 32, "group_size": 16},
        "loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 2},
        "distill": TAUGHT,
    },
    "in_16_bit": {
        "primary_weights": {"kind": "stochastic_rounding"},
        "prune": {**GROWING, "dynamic": "rigl", "criterion": "random", "schedule": "one_shot"},
        "qat": {"scheme": "int8", "range": "lsq_plus", "begin": 2, "freeze_observers": 5},
    },
    "factorized": {
        "low_rank": {"rank": 4, "min_size": 64, "force": True, "merge": True},
        "distill": {"chunked": True, "budget_mib": 0.001, **TAUGHT},
        "checkpointing": {"policy": "block"},
    },
    "lottery": {
        "lottery": {"rewind_to": 2},
        "qat": {"scheme": "int8_dynamic_int4_weight", "begin": 3, "rounding": "stochastic"},
        "distill": {"teacher": "mutual", "peers": 2},
    },
    "private": {
        "dp": {"noise_multiplier": 0.5, "max_grad_norm": 2.0, "seed": 0},
        "low_rank": {"rank": 4, "min_size": 64, "force": True, "merge": True},
        "average": {"kind": "ema", "decay": 0.7, "begin": 2},
    },
}
OTHERWISE: dict[tuple[str, str], dict[str, Any]] = {
    ("resnet", "shared"): {"prune": {**GROWING, "criterion": "fisher", "granularity": "filter"}, "fp8": None},
    ("resnet", "factorized"): {"distill": TAUGHT},
}
"""What a model needs other options for, or does without."""
REFUSED = {
    ("moe", "private"): r"mlp\.experts \(Qwen2MoeExperts\) has no rule.*hidden_states, top_k_index, top_k_weights",
    ("resnet", "private"): "BatchNorm2d.*normalizes .* its batch",
    ("resnet", "adapted"): "lora: only linear layers can be adapted",
}
"""Recipes that cannot be run on a model → what the refusal says."""


def recipe_for(name: str, key: str) -> Recipe:
    """Return a recipe with a teacher and a ticket of its own, which a run uses up; most of the mixture is experts."""
    recipe = {**RECIPES[key], **OTHERWISE.get((name, key), {})}
    recipe = {room: dict(options) for room, options in recipe.items() if options is not None}
    if "distill" in recipe and "teacher" not in recipe["distill"]:
        recipe["distill"]["teacher"] = promise_table.make_teacher()
    if "lottery" in recipe:
        recipe["lottery"] |= promise_table.make_ticket("weights", recipe["lottery"]["rewind_to"])
    return Recipe.from_dict({**recipe, "allow_partial": name == "moe"})
