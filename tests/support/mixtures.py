"""Small mixtures of experts of transformers, whose experts are stacked as those of the models that people train."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_eff import attach
from shared_core import Recipe

VOCAB = 32
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "head_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip
KINDS = ("mixtral", "qwen3_moe", "gpt_oss")


def mixture(kind: str, **options: Any) -> Any:
    """Four experts in two stacks, (experts, out, in) but for GPT-OSS, whose are (experts, in, out)."""
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **_SIZES | options))
    if kind == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, **{"moe_intermediate_size": 8} | _SIZES | options))
    return GptOssForCausalLM(GptOssConfig(num_local_experts=4, pad_token_id=0, eos_token_id=1, **_SIZES | options))


def rows(count: int = 16) -> list[dict[str, Tensor]]:
    """Tokens that follow a rule."""
    found = [torch.tensor([(i * 5 + j * (2 + i % 3)) % VOCAB for j in range(8)]) for i in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def stacks(model: Any) -> dict[str, Tensor]:
    """By name the parameters that stack experts, with the axis of the inputs last."""
    found = {name: weight.detach() for name, weight in model.state_dict().items() if weight.ndim == 3}
    return {name: weight.mT if "GptOss" in type(model).__name__ else weight for name, weight in found.items()}


def fit(kind: str, recipe: dict[str, Any], folder: Any, resume: Any = None, steps: int = 8) -> Any:
    """Return the Trainer of a run with a recipe, which saves every four steps."""
    trainer = Trainer(
        model=mixture(kind),
        args=TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1,
            save_strategy="steps", save_steps=4, report_to="none", use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=rows(),
    )  # fmt: skip
    attach(trainer, Recipe.from_dict(recipe))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def losses(trainer: Any) -> list[float]:
    """The loss of every step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
