"""What techniques make of a run's weights and activations, which are counted once for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shared_core.config.model_shape import ModelShape, PlannedRun

_BASE_BYTES = {"nf4": 0.53, "fp4": 0.53, "int8": 1.0}  # codes with a scale for each 64 of them, or for each row
_PACKED_BYTES = {"bf16": 2.0, "fp16": 2.0, "int8": 1.1}
# A token, layer and hidden unit: measured on transformers' Llama, whose scores scaled_dot_product_attention does not
# keep.
ACTIVATION_BYTES = {"fp32": 79, "mixed": 54, "16-true": 42}
# Of a score where attention is eager: softmax, dropout's mask and what it leaves (BERT, GPT-2), or in 16 bit a softmax
# in fp32 and its cast (Llama).
_KEPT_OF_A_SCORE = 3
_SELECTIVE_SHARE = 0.66  # measured on a transformer of 16 blocks of width 256


def shaped(recipe: Mapping[str, Any], shape: ModelShape) -> ModelShape:
    """Return the sizes of the model that is trained: factorised, with `low_rank`."""
    kept = recipe["low_rank"].kept_share(shape) if "low_rank" in recipe else None
    return shape if kept is None else replace(shape, params=shape.embeddings + round(kept * shape.matrices))


def activation_bytes(recipe: Mapping[str, Any], shape: ModelShape, run: PlannedRun) -> tuple[float, float]:
    """Return the bytes of activations (on the device, on the host)."""
    size = _recomputed(recipe.get("checkpointing"), shape, run)
    packing = recipe.get("activations")
    if packing is None:
        return size, 0.0
    if packing.rounds:
        size *= min(1.0, _PACKED_BYTES[packing.pack] / run.compute_bytes)
    return (0.0, size) if packing.offload else (size, 0.0)


def _recomputed(config: Any, shape: ModelShape, run: PlannedRun) -> float:
    """Return the bytes of activations that are kept at the worst moment: all, or what a policy leaves."""
    count, whole = shape.layers, ACTIVATION_BYTES[run.precision] * run.tokens * shape.hidden
    if run.attention == "eager":
        whole += _KEPT_OF_A_SCORE * run.compute_bytes * run.tokens * run.seq_len * shape.heads
    given = run.compute_bytes * run.tokens * shape.hidden  # what goes from block to block
    # Each block's input, and one block in full while it is computed again.
    least = float(count * given + whole)
    if config is None or config.policy in ("sublayer", "stage"):
        return float(count * whole)
    if config.policy == "selective":
        return _SELECTIVE_SHARE * count * whole
    if config.policy == "sqrt":
        # Chen et al. (2016, arXiv:1604.06174): sqrt(L) segments keep their inputs, one is there in full.
        segments = max(1, round(math.sqrt(count)))
        return float(segments * given + math.ceil(count / segments) * whole)
    if config.policy == "every_k":
        # Every k-th block is computed again: the others stay, plus one in full.
        chosen = -(-count // config.k)
        return float((count - chosen + 1) * whole + chosen * given)
    if config.policy == "block":
        return least
    number, unit = config.budget
    # A budget is what it says, unless everything takes less.
    wanted = {"fraction": number * count * whole, "bytes": number, "least": least}[unit]
    return min(float(count * whole), float(wanted))


def weight_bytes(recipe: Mapping[str, Any], shape: ModelShape, run: PlannedRun) -> float:
    """Return the bytes of all weights, whole."""
    lora = recipe.get("lora")
    if lora is None:
        return float(shape.params * run.weight_bytes)
    each = _BASE_BYTES.get(lora.base, run.weight_bytes)
    return shape.matrices * each + (shape.embeddings + trained(recipe, shape)) * run.weight_bytes


def trained(recipe: Mapping[str, Any], shape: ModelShape) -> int:
    """Return how many parameters have gradients and moments."""
    lora = recipe.get("lora")
    # 4 matrices of h x h and two of h x 4h have 8·h + 10·h rows and columns
    return shape.params if lora is None else 18 * lora.rank * shape.hidden * shape.layers
