"""The bytes that each technique adds to a run or takes away, by formula; a technique of yours registers its own.

`memory_costs.register(MyConfig, function)` and `resized.register(MyConfig, function)` take functions of (config, …).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch

from shared_core.activation_checkpointing.config import CheckpointingConfig
from shared_core.activation_compression.config import ActivationsConfig
from shared_core.config.options import TechniqueConfig
from shared_core.contrib.planning.sizes import Cost, ModelShape, PlannedRun, SharedSizes
from shared_core.distillation.config import DistillConfig
from shared_core.fp8.config import Fp8Config
from shared_core.gradient_compression.config import CommConfig
from shared_core.lora.config import LoraConfig
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.low_rank.config import LowRankConfig
from shared_core.primary_weights.config import PrimaryWeightsConfig
from shared_core.privacy.config import PrivacyConfig
from shared_core.pruning.config import PruneConfig
from shared_core.soup.config import SoupConfig
from shared_core.weight_average.config import AverageConfig
from shared_core.weight_clustering.config import ClusterConfig

_NOT_COUNTED = {
    "activations": "see the line above; exact saves what the receipt says, 0 to 50 % and more",
    "checkpointing": "see the line of activations; sublayer and stage depend on the model: not counted",
    "lora": "frozen weights in codes; gradients and moments of adapters alone, 18·r·h a block",
    "loss_scale": "one flag and one number agreed on by all ranks",
    "matmul": "no memory, no traffic",
    "qat": "a few numbers a layer, agreed on each step; quantised weights are saved for backward as float",
}
_OF_CODES = {"nf4": 0.53, "fp4": 0.53, "int8": 1.0, "float32": 4.0}  # 4 bits: with a scale for each 64 of them
_PACKED_BYTES = {"bf16": 2.0, "fp16": 2.0, "int8": 1.1}
_CHUNK_MIB = 512  # of chunked distillation on a GPU
_SELECTIVE_SHARE = 0.66  # measured on a transformer of 16 blocks of width 256
_IN_ROWS_OF_SEVERAL = 1 << 18  # elements, of clustered weights that are not sharded


@singledispatch
def memory_costs(config: TechniqueConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return what a technique adds to a run's memory and traffic, or takes away.

    Args:
        config: Of the technique.
        shape: Of the model that is trained.
        run: Processes, precision and batch.
    """
    return [Cost(config.key, why=_NOT_COUNTED.get(config.key, "not counted: there is no formula for it"))]


@singledispatch
def resized(config: TechniqueConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    """Return what a technique makes of that which is counted once for all techniques.

    Args:
        config: Of the technique.
        sizes: As the techniques before it leave them.
        shape: Of the model that is trained.
        run: Processes, precision and batch.
    """
    return sizes


def reshaped(config: TechniqueConfig, shape: ModelShape) -> ModelShape:
    """Return the sizes of the model that is trained: others where low-rank factors take the place of matrices."""
    kept = _kept_share(config, shape) if isinstance(config, LowRankConfig) else None
    return shape if kept is None else replace(shape, params=shape.embeddings + round(kept * shape.matrices))


@resized.register
def _(config: ActivationsConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    left = sizes.activations
    if config.rounds:
        left *= min(1.0, _PACKED_BYTES[config.pack] / run.compute_bytes)
    return replace(sizes, activations=0.0, on_host=left) if config.offload else replace(sizes, activations=left)


@resized.register
def _(config: CheckpointingConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    """Return the bytes of activations that are kept at the worst moment."""
    count, whole = shape.layers, sizes.activations / shape.layers
    given = run.compute_bytes * run.tokens * shape.hidden  # what goes from block to block
    least, kept = count * given + whole, sizes.activations
    if config.policy == "selective":
        kept *= _SELECTIVE_SHARE
    elif config.policy == "sqrt":
        segments = max(1, round(math.sqrt(count)))
        kept = segments * given + math.ceil(count / segments) * whole
    elif config.policy == "every_k":
        chosen = -(-count // config.k)
        kept = (count - chosen + 1) * whole + chosen * given
    elif config.policy == "block":
        kept = least
    elif config.has_budget:
        number, unit = config.budget
        kept = min(kept, {"fraction": number * kept, "bytes": number, "least": least}[unit])
    return replace(sizes, activations=kept)


@resized.register
def _(config: DistillConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    return replace(sizes, logits=0.0) if config.chunked else sizes


@resized.register
def _(config: LoraConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    # 4 matrices of h x h and two of h x 4h have 8·h + 10·h rows and columns
    trained = 18 * config.rank * shape.hidden * shape.layers
    codes = shape.matrices * _OF_CODES.get(config.base, run.weight_bytes)
    return replace(sizes, trained=trained, weights=codes + (shape.embeddings + trained) * run.weight_bytes)


@memory_costs.register
def _(config: AverageConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    copies = config.k if config.kind == "last_k" else 1
    why = f"{copies} x 4 bytes a parameter, cut as the weights are"
    return [Cost(f"average: {config.kind}", held=copies * 4.0 * shape.params / run.parts, why=why)]


@memory_costs.register
def _(config: ClusterConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of codes: those of weights that are clustered in rows of several take 4 more."""
    sizes = ((4 * shape.layers, shape.hidden**2), (2 * shape.layers, 4 * shape.hidden**2))
    small = sum(count * size for count, size in sizes if size <= _IN_ROWS_OF_SEVERAL and run.parts == 1)
    held = shape.params / run.parts + 4 * small
    return [Cost("cluster: codes", held=held, why="1 byte a weight, 5 of small ones")]


@memory_costs.register
def _(config: CommConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of gradients that are not sent, and of the error that powersgd keeps."""
    if run.strategy == "fsdp2":  # the reduce-scatter alone, in every micro-batch: 2 bytes in place of compute_bytes
        sent = (2.0 - run.compute_bytes) * run.accumulate * run.ring(shape.params)
        return [Cost(f"comm: {config.hook}", sent=min(sent, 0.0), why="gradients in 2 bytes")]
    # An all-reduce is a reduce-scatter and an all-gather: twice a ring's bytes.
    whole = 2 * run.ring(shape.params * run.weight_bytes)
    if config.hook in ("fp16", "bf16"):
        sent = 2.0 / run.weight_bytes
        return [Cost(f"comm: {config.hook}", sent=(sent - 1) * whole, why="gradients in 2 bytes")]
    # 18·r·h of 12·h² in a block; what lies outside is counted as a matrix of V x h
    sent = config.rank * (18 * shape.hidden * shape.layers + shape.vocab + shape.hidden) / shape.params
    why = f"r·(m + n) of a matrix with r = {config.rank} from begin on; held: the error, 4 bytes a parameter"
    return [Cost("comm: powersgd", held=4.0 * shape.params, sent=(sent - 1) * whole, why=why)]


@memory_costs.register
def _(config: DistillConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of logits, whole or in chunks, and of the teacher."""
    if config.chunked:
        chunk = 2.0**20 * (config.budget_mib or _CHUNK_MIB)
        costs = [Cost("distill: chunk of logits", during=chunk, why="budget_mib")]
    else:
        logits = run.tokens * shape.vocab * (run.compute_bytes + 4.0)
        costs = [Cost("distill: logits", during=logits, why="the teacher's and the soft term's gradient, T·V·(c + 4)")]
    if not run.teacher_params:
        why = "not counted: give --teacher-params; a cached teacher (eff cache-teacher) needs none"
        return [*costs, Cost("distill: teacher", why=why)]
    bytes_each = _OF_CODES.get(config.teacher_dtype, run.compute_bytes)
    size = run.teacher_params * bytes_each
    sent = run.accumulate * run.ring(size) if run.strategy == "fsdp2" else 0.0
    why = f"P_t·{bytes_each:g}/N; gathered in every forward under FSDP2"
    return [*costs, Cost("distill: teacher", held=size / run.parts, sent=sent, why=why)]


@memory_costs.register
def _(config: Fp8Config, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of a weight's codes and of its transpose's, which later micro-batches multiply too."""
    why = "2 bytes a linear weight until the next step's forward; saved inputs take 1 byte a value for each layer"
    return [Cost("fp8: codes", during=2.0 * shape.matrices if run.parts == 1 else 0.0, why=why)]


@memory_costs.register
def _(config: LotteryConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    return [Cost("lottery: masks", held=shape.matrices / run.parts, why="1 byte a weight")]


@memory_costs.register
def _(config: LowRankConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return no bytes of its own: the factorised model has other sizes, see `reshaped`."""
    if _kept_share(config, shape) is None:
        return [Cost("low_rank", why=f"not counted: what {config.rank} keeps is known from eff low-rank alone")]
    return [Cost("low_rank", why="factors in place of the blocks' matrices: counted in every line")]


def _kept_share(config: LowRankConfig, shape: ModelShape) -> float | None:
    """Return the share of the blocks' parameters that factors have, None where weights alone tell it."""
    if config.rule.kind == "budget":
        return float(config.rule.value)
    rank = {"number": config.rule.value, "share": config.rule.value * shape.hidden}.get(config.rule.kind)
    # 4 matrices of h x h and two of h x 4h have 18·h rows and columns for 12·h² parameters
    return None if rank is None else min(1.0, 1.5 * rank / shape.hidden)


@memory_costs.register
def _(config: PrimaryWeightsConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of what is kept beside the weights, and of moments and gradients in float32."""
    kept = {"fp32_copy": 4.0, "stochastic_rounding": 0.0, "kahan": 2.0}[config.kind]
    size, is_wide = shape.params / run.parts, config.state_dtype == "float32"
    held = kept + (4 - run.weight_bytes) * run.moments * is_wide
    why = "2 bytes of what was lost with kahan"
    if is_wide:
        why = "moments in fp32, 4 bytes of a copy with fp32_copy, 2 of what was lost with kahan; fp32 gradients"
    return [Cost("primary_weights", held=held * size, during=4.0 * is_wide * size, why=why)]


@memory_costs.register
def _(config: PrivacyConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of what gradients of single examples are made of, and of their sums between ranks."""
    sizes = 4.0 * shape.params
    passed = run.compute_bytes * run.tokens * (16 * shape.hidden * shape.layers + 2 * shape.hidden + shape.vocab)
    why = "inputs of layers and gradients of outputs, or gradients of each example; /N: their clipped sum"
    during = min(passed, run.micro_batch * sizes) + sizes / run.parts
    sent = run.accumulate * run.ring(sizes) if run.strategy == "fsdp2" else 2 * run.ring(sizes)
    return [Cost("dp", during=during, sent=sent, why=why)]


@memory_costs.register
def _(config: PruneConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of masks, and of what lies beneath them or scores them."""
    size = shape.linear / run.parts
    packed = shape.linear / 8 if run.parts > 1 else 0.0
    costs = [Cost("prune: masks", held=size, host=packed, why="1 byte a linear weight; under FSDP2 whole ones in bits")]
    if config.straight_through:
        costs.append(Cost("prune: weights beneath masks", held=4 * size, why="learn on until end, 4 bytes"))
    if config.criterion in ("movement", "taylor", "fisher", "neuron_taylor"):
        costs.append(Cost(f"prune: {config.criterion} scores", held=4 * size, why="until end, 4 bytes a weight"))
    return costs


@memory_costs.register
def _(config: SoupConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return no bytes on the device, and say what the end of training takes on the host."""
    held = 4 * shape.params / run.parts / 2**30
    why = f"after training alone: {held:,.1f} GiB of host memory, an fp32 model, and as much in a file in TMPDIR"
    return [Cost("soup", why=why)]
