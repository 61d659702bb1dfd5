"""What each technique adds to a run, or takes away; one function a recipe key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shared_core.tools.planning.model_shape import Cost, ModelShape, PlannedRun

_KEPT_SCORES = ("taylor", "fisher", "neuron_taylor")
_BASE_BYTES = {"nf4": 0.53, "fp4": 0.53, "int8": 1.0}  # codes with a scale for each 64 of them, or for each row
_TEACHER_BYTES = {"nf4": 0.53, "int8": 1.0, "float32": 4.0}
_PACKED_BYTES = {"bf16": 2.0, "fp16": 2.0, "int8": 1.1}
# A token, layer and hidden unit: measured on transformers' Llama, whose scores scaled_dot_product_attention does not
# keep.
ACTIVATION_BYTES = {"fp32": 79, "mixed": 54, "16-true": 42}
# Of a score where attention is eager: softmax, dropout's mask and what it leaves (BERT, GPT-2), or in 16 bit a softmax
# in fp32 and its cast (Llama).
_KEPT_OF_A_SCORE = 3
_SELECTIVE_SHARE = 0.66  # measured on a transformer of 16 blocks of width 256
_CHUNK_MIB = 512  # of chunked distillation on a GPU
_BUNDLED = 1 << 18
_SOUP_MODELS = 2.4  # measured, see shared_core/soup/README.md


def _prune(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    size = shape.linear / run.parts
    packed = shape.linear / 8 if run.parts > 1 else 0.0
    costs = [Cost("prune: masks", held=size, host=packed, why="1 byte a linear weight; under FSDP2 whole ones in bits")]
    if config.straight_through:
        costs.append(Cost("prune: weights beneath masks", held=4 * size, why="learn on until end, 4 bytes"))
    if config.criterion == "movement" or config.criterion in _KEPT_SCORES:
        costs.append(Cost(f"prune: {config.criterion} scores", held=4 * size, why="until end, 4 bytes a weight"))
    return costs


def _average(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    copies = config.k if config.kind == "last_k" else 1
    held = copies * 4.0 * shape.params / run.parts
    return [Cost(f"average: {config.kind}", held=held, why=f"{copies} x 4 bytes a parameter, cut as the weights are")]


def _primary_weights(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    extra = (4 - run.weight_bytes) * run.moments
    copy = 4.0 if config.kind == "fp32_copy" else 0.0
    why = "moments in fp32, 4 bytes of a copy with fp32_copy; fp32 gradients in the step"
    held = (copy + extra) * shape.params / run.parts
    return [Cost("primary_weights", held=held, during=4.0 * shape.params / run.parts, why=why)]


def _distill(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    if config.chunked:
        chunk = 2.0**20 * (config.budget_mib or _CHUNK_MIB)
        costs = [Cost("distill: chunk of logits", during=chunk, why="budget_mib")]
    else:
        logits = run.tokens * shape.vocab * (run.compute_bytes + 4.0)
        costs = [Cost("distill: logits", during=logits, why="the teacher's and the soft term's gradient, T·V·(c + 4)")]
    if run.teacher_params:
        bytes_each = _TEACHER_BYTES.get(config.teacher_dtype, run.compute_bytes)
        size = run.teacher_params * bytes_each
        sent = run.accumulate * run.ring(size) if run.strategy == "fsdp2" else 0.0
        why = f"P_t·{bytes_each:g}/N; gathered in every forward under FSDP2"
        return [*costs, Cost("distill: teacher", held=size / run.parts, sent=sent, why=why)]
    why = "not counted: give --teacher-params; a cached teacher (eff cache-teacher) needs none"
    return [*costs, Cost("distill: teacher", why=why)]


def _soup(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    held = _SOUP_MODELS * 4 * shape.params / run.parts
    return [
        Cost("soup", why=f"after training alone: {held / 2**30:,.1f} GiB of host memory, {_SOUP_MODELS} fp32 models")
    ]


def _lora(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    return [Cost("lora", why="frozen weights in codes; gradients and moments of adapters alone, 18·r·h a block")]


def _low_rank(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    if _kept_share(config, shape) is None:
        return [Cost("low_rank", why=f"not counted: what {config.rank} keeps is known from eff low-rank alone")]
    return [Cost("low_rank", why="factors in place of the blocks' matrices: counted in every line")]


def _comm(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    if run.strategy == "fsdp2":  # the reduce-scatter alone, in every micro-batch
        sent = (2.0 - run.compute_bytes) * run.accumulate * run.ring(shape.params)
        return [Cost(f"comm: {config.hook}", sent=min(sent, 0.0), why="gradients in 2 bytes")]
    whole = 2 * run.ring(shape.params * run.weight_bytes)
    if config.hook in ("fp16", "bf16"):
        sent = 2.0 / run.weight_bytes
        return [Cost(f"comm: {config.hook}", sent=(sent - 1) * whole, why="gradients in 2 bytes")]
    # 18·r·h of 12·h² in a block; what lies outside is counted as a matrix of V x h
    sent = config.rank * (18 * shape.hidden * shape.layers + shape.vocab + shape.hidden) / shape.params
    held = 4.0 * shape.params
    why = f"r·(m + n) of a matrix with r = {config.rank} from begin on; held: the error, 4 bytes a parameter"
    return [Cost("comm: powersgd", held=held, sent=(sent - 1) * whole, why=why)]


def _dp(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    sizes = 4.0 * shape.params
    if run.strategy != "fsdp2":
        why = "gradients of each example of a micro-batch, and their clipped sum; joined over ranks once a step"
        return [Cost("dp", during=(run.micro_batch + 1) * sizes, sent=2 * run.ring(sizes), why=why)]
    passed = run.compute_bytes * run.tokens * (16 * shape.hidden * shape.layers + 2 * shape.hidden + shape.vocab)
    largest = 4.0 * run.micro_batch * max(shape.vocab, 4 * shape.hidden) * shape.hidden
    why = "inputs of layers and gradients of outputs, one layer's gradients of each example; /N: their clipped sum"
    during = min(passed, run.micro_batch * sizes) + largest + sizes / run.parts
    return [Cost("dp", during=during, sent=run.accumulate * run.ring(sizes), why=why)]


def _kept_share(config: Any, shape: ModelShape) -> float | None:
    rule = config.rule
    if rule.kind == "budget":
        return float(rule.value)
    rank = {"number": rule.value, "share": rule.value * shape.hidden}.get(rule.kind)
    # 4 matrices of h x h and two of h x 4h have 18·h rows and columns for 12·h² parameters
    return None if rank is None else min(1.0, 1.5 * rank / shape.hidden)


def shaped(recipe: Mapping[str, Any], shape: ModelShape) -> ModelShape:
    """Return the sizes of the model that is trained: factorised, with `low_rank`."""
    kept = _kept_share(recipe["low_rank"], shape) if "low_rank" in recipe else None
    return shape if kept is None else replace(shape, params=shape.embeddings + round(kept * shape.matrices))


def _share(config: Any, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    # weights of up to 2^18 elements are clustered in rows of several, with codes of 4 bytes more; sharded ones alone
    sizes = ((4 * shape.layers, shape.hidden**2), (2 * shape.layers, 4 * shape.hidden**2))
    small = sum(count * size for count, size in sizes if size <= _BUNDLED and run.parts == 1)
    return [Cost("cluster: codes", held=shape.params / run.parts + 4 * small, why="1 byte a weight, 5 of small ones")]


def _nothing(why: str) -> Callable[[Any, ModelShape, PlannedRun], list[Cost]]:
    return lambda config, shape, run: [Cost(config.key, why=why)]


COSTS: dict[str, Callable[[Any, ModelShape, PlannedRun], list[Cost]]] = {
    "matmul": _nothing("no memory, no traffic"),
    "loss_scale": _nothing("one flag and one number agreed on by all ranks"),
    "qat": _nothing("a few numbers a layer, agreed on each step; quantised weights are saved for backward as float"),
    "fp8": _nothing("histories of a few numbers a layer; casts saved for backward take 1 byte a value in place of 2"),
    "low_rank": _low_rank,
    "comm": _comm,
    "dp": _dp,
    "checkpointing": _nothing("see the line of activations; sublayer and stage depend on the model: not counted"),
    "activations": _nothing("see the line above; exact saves what the receipt says, 0 to 50 % and more"),
    "cluster": _share,
    "lottery": lambda config, shape, run: [
        Cost("lottery: masks", held=shape.matrices / run.parts, why="1 byte a weight")
    ],
    "prune": _prune,
    "average": _average,
    "primary_weights": _primary_weights,
    "distill": _distill,
    "soup": _soup,
    "lora": _lora,
}


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
    least = float(count * given + whole)
    if config is None or config.policy in ("sublayer", "stage"):
        return float(count * whole)
    if config.policy == "selective":
        return _SELECTIVE_SHARE * count * whole
    if config.policy == "sqrt":
        segments = max(1, round(math.sqrt(count)))
        return float(segments * given + math.ceil(count / segments) * whole)
    if config.policy == "every_k":
        chosen = -(-count // config.k)
        return float((count - chosen + 1) * whole + chosen * given)
    if config.policy == "block":
        return least
    number, unit = config.budget
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
