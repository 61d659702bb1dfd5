"""Memory and traffic of a run per device: weights, gradients, moments, activations, and each technique's share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from shared_core.activation_checkpointing.config import CheckpointingConfig
from shared_core.activation_compression.config import ActivationsConfig
from shared_core.config.options import TechniqueConfig
from shared_core.contrib.planning.sizes import Attention, Cost, ModelShape, PlannedRun, SharedSizes
from shared_core.distillation.config import EMA, SELF, DistillConfig
from shared_core.engine.registry import in_order
from shared_core.errors import ConfigError
from shared_core.fp8.config import Fp8Config
from shared_core.gradient_compression.config import CommConfig
from shared_core.lora.config import LoraConfig
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.low_rank.config import LowRankConfig
from shared_core.modules.calls import call
from shared_core.primary_weights.config import PrimaryWeightsConfig
from shared_core.printing import size_text
from shared_core.privacy.config import PrivacyConfig
from shared_core.pruning.config import PruneConfig
from shared_core.soup.config import SoupConfig
from shared_core.weight_average.config import AverageConfig
from shared_core.weight_clustering.config import ClusterConfig

_NOT_COUNTED = {
    "activations": "see the line above; what exact saves (0 to 50 % and more) is in the receipt",
    "checkpointing": "see the line of activations; sublayer and stage depend on the model: not counted",
    "lora": "frozen weights in codes; gradients and moments only for adapters, 18·r·h per block",
    "loss_scale": "one flag and one number, shared by all ranks",
    "matmul": "no memory, no traffic",
    "qat": "a few numbers per layer, synchronized each step; quantized weights are saved for backward as float",
}
_OF_CODES = {"nf4": 0.53, "fp4": 0.53, "int8": 1.0, "float32": 4.0}  # 4 bits: with one scale per 64 codes
_PACKED_BYTES = {"bf16": 2.0, "fp16": 2.0, "int8": 1.1}
_CHUNK_MIB = 512  # default of chunked distillation on a GPU
_SELECTIVE_SHARE = 0.66  # measured on a transformer of 16 blocks of width 256
_IN_ROWS_OF_SEVERAL = 1 << 18  # elements, of clustered weights that are not sharded


@singledispatch
def memory_costs(config: TechniqueConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return how a technique changes a run's memory and traffic."""
    return [Cost(config.key, why=_NOT_COUNTED.get(config.key, "not counted: there is no formula for it"))]


@singledispatch
def resized(config: TechniqueConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    """Return the shared sizes after a technique's changes."""
    return sizes


def reshaped(config: TechniqueConfig, shape: ModelShape) -> ModelShape:
    """Return the sizes of the trained model, which are smaller if low-rank factors replace matrices."""
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
    given = run.compute_bytes * run.tokens * shape.hidden  # the input of one block
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
    """Return the bytes of codes. Small weights, which are clustered several at a time, take 4 more bytes each."""
    sizes = ((4 * shape.layers, shape.hidden**2), (2 * shape.layers, 4 * shape.hidden**2))
    small = sum(count * size for count, size in sizes if size <= _IN_ROWS_OF_SEVERAL and run.parts == 1)
    held = shape.params / run.parts + 4 * small
    return [Cost("cluster: codes", held=held, why="1 byte per weight, 5 for small ones")]


@memory_costs.register
def _(config: CommConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the saved bytes of gradients, and the error that powersgd keeps."""
    if run.strategy == "fsdp2":  # only the reduce-scatter, in every micro-batch: 2 bytes instead of compute_bytes
        sent = (2.0 - run.compute_bytes) * run.accumulate * run.ring(shape.params)
        return [Cost(f"comm: {config.hook}", sent=min(sent, 0.0), why="gradients in 2 bytes")]
    # An all-reduce is a reduce-scatter and an all-gather: twice a ring's bytes.
    whole = 2 * run.ring(shape.params * run.weight_bytes)
    if config.hook in ("fp16", "bf16"):
        sent = 2.0 / run.weight_bytes
        return [Cost(f"comm: {config.hook}", sent=(sent - 1) * whole, why="gradients in 2 bytes")]
    # 18·r·h of 12·h² per block. Weights outside blocks count as one matrix of V x h.
    sent = config.rank * (18 * shape.hidden * shape.layers + shape.vocab + shape.hidden) / shape.params
    why = f"r·(m + n) per matrix with r = {config.rank} after begin; held: the error, 4 bytes per parameter"
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
    is_student = config.teaching in (SELF, EMA)
    parameters = shape.params if is_student else run.teacher_params
    if not parameters:
        why = "not counted: pass --teacher-params; a cached teacher (eff cache-teacher) needs no memory"
        return [*costs, Cost("distill: teacher", why=why)]
    as_saved = run.weight_bytes if is_student else run.compute_bytes
    bytes_each = as_saved if config.teacher_dtype == "as_saved" else _OF_CODES.get(config.teacher_dtype, 2.0)
    size = parameters * bytes_each
    sent = run.accumulate * run.ring(size) if run.strategy == "fsdp2" else 0.0
    why = f"P_t·{bytes_each:g}/N; gathered in every forward under FSDP2"
    return [*costs, Cost("distill: teacher", held=size / run.parts, sent=sent, why=why)]


@memory_costs.register
def _(config: Fp8Config, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of the codes of weights and their transposes, which later micro-batches reuse."""
    why = "2 bytes per linear weight until the next step's forward; saved inputs take 1 byte per value in each layer"
    return [Cost("fp8: codes", during=2.0 * shape.matrices if run.parts == 1 else 0.0, why=why)]


@memory_costs.register
def _(config: LotteryConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    return [Cost("lottery: masks", held=shape.matrices / run.parts, why="1 byte per weight")]


@memory_costs.register
def _(config: LowRankConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return no extra bytes: the factorized model has smaller sizes, see `reshaped`."""
    if _kept_share(config, shape) is None:
        return [Cost("low_rank", why=f"not counted: only eff low-rank can tell what {config.rank} keeps")]
    return [Cost("low_rank", why="factors replace the blocks' matrices: counted in every line")]


def _kept_share(config: LowRankConfig, shape: ModelShape) -> float | None:
    """Return the factors' share of the blocks' parameters, None if it depends on the weights."""
    if config.rule.kind == "budget":
        return float(config.rule.value)
    rank = {"number": config.rule.value, "share": config.rule.value * shape.hidden}.get(config.rule.kind)
    # 4 matrices of h x h and two of h x 4h have 18·h rows and columns for 12·h² parameters
    return None if rank is None else min(1.0, 1.5 * rank / shape.hidden)


@memory_costs.register
def _(config: PrimaryWeightsConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes kept in addition to the weights, and those of float32 moments and gradients."""
    kept = {"fp32_copy": 4.0, "stochastic_rounding": 0.0, "kahan": 2.0}[config.kind]
    size, is_wide = shape.params / run.parts, config.state_dtype == "float32"
    held = kept + (4 - run.weight_bytes) * run.moments * is_wide
    why = "2 bytes for the rounding error with kahan"
    if is_wide:
        why = "moments in fp32, 4 bytes for the copy with fp32_copy, 2 for the error with kahan; fp32 gradients"
    return [Cost("primary_weights", held=held * size, during=4.0 * is_wide * size, why=why)]


@memory_costs.register
def _(config: PrivacyConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes needed for per-example gradients, and for their sums between ranks."""
    sizes = 4.0 * shape.params
    passed = run.compute_bytes * run.tokens * (16 * shape.hidden * shape.layers + 2 * shape.hidden + shape.vocab)
    why = "layer inputs and output gradients, or per-example gradients; /N: their clipped sum"
    during = min(passed, run.micro_batch * sizes) + sizes / run.parts
    sent = run.accumulate * run.ring(sizes) if run.strategy == "fsdp2" else 2 * run.ring(sizes)
    return [Cost("dp", during=during, sent=sent, why=why)]


@memory_costs.register
def _(config: PruneConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return the bytes of masks, of the weights beneath them and of scores."""
    size = shape.linear / run.parts
    packed = shape.linear / 8 if run.parts > 1 else 0.0
    costs = [
        Cost("prune: masks", held=size, host=packed, why="1 byte per linear weight; under FSDP2, whole ones in bits")
    ]
    if config.straight_through:
        costs.append(Cost("prune: weights beneath masks", held=4 * size, why="keep training until end, 4 bytes each"))
    if config.criterion in ("movement", "taylor", "fisher", "neuron_taylor"):
        costs.append(Cost(f"prune: {config.criterion} scores", held=4 * size, why="until end, 4 bytes per weight"))
    return costs


@memory_costs.register
def _(config: SoupConfig, shape: ModelShape, run: PlannedRun) -> list[Cost]:
    """Return no bytes on the device. The note gives the host memory at the end of training."""
    held = size_text(4 * shape.params / run.parts)
    why = f"only after training: {held} of host memory (an fp32 model), and as much in a file in TMPDIR"
    return [Cost("soup", why=why)]


def counted_costs(
    model: nn.Module,
    run: PlannedRun,
    recipe: Mapping[str, TechniqueConfig],
    *,
    touched: Mapping[str, int],
    shape: ModelShape | None = None,
    activations: int | str | None = None,
) -> list[Cost]:
    """Return what a run needs per device: weights, gradients and moments are counted, techniques by formula.

    Example:
        >>> costs = counted_costs(nn.Linear(8, 4, bias=False), PlannedRun(), {}, touched={}, activations=64)
        >>> {cost.what: cost.held + cost.during for cost in costs}
        {'weights': 128.0, 'moments of adamw': 256.0, 'gradients': 128.0, 'activations': 64.0}
    """
    parameters = list(model.parameters())
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    # Moments in the weights' dtype, and those with a fixed number of bytes per element.
    beside = run.moment_bytes - run.moments * run.weight_bytes
    moments = sum(run.moments * parameter.nbytes + beside * parameter.numel() for parameter in learned)
    costs = [
        Cost("weights", held=float(_bytes([*parameters, *model.buffers()])), why="counted, with buffers"),
        Cost(f"moments of {run.optimizer}", held=moments, why="of trainable parameters"),
        Cost("gradients", during=float(_bytes(learned)), why="counted"),
    ]
    if isinstance(activations, str):
        costs.append(Cost("activations", why=f"unknown: {activations}"))
    elif activations is not None:
        costs.append(Cost("activations", during=float(activations), why="saved by autograd for the example inputs"))
    elif shape is not None:
        run = replace(run, attention=attention_of(model))
        sizes = _shared_sizes(recipe, shape, run)
        scores = " + 3·c·T·L·s·heads" if run.attention == "eager" else ""
        why = f"a·T·L·h{scores} of {run.tokens:,} tokens; logits T·V·(c + 8)"
        during = sizes.activations + sizes.logits
        costs.append(Cost("activations and logits", during=during, host=sizes.on_host, why=why))
    else:
        why = "unknown: return (model, example_inputs) from the function, or pass a language model's folder"
        costs.append(Cost("activations", why=why))
    number = sum(parameter.numel() for parameter in parameters)
    for key, config in recipe.items():
        # Formulas use layers and hidden size. For a real model, count all its parameters as one layer, and those that
        # a technique does not touch as embeddings, which its formulas ignore.
        rest = max(number - touched.get(key, 0), 0)
        own = ModelShape(params=number, layers=1, hidden=1, vocab=rest, embeddings=rest)
        # Logits depend on the model's vocabulary, not on the parameters that the technique touches.
        costs += memory_costs(config, shape if key == "distill" and shape is not None else own, run)
    return costs


def attention_of(model: nn.Module) -> Attention:
    """Return ``eager`` if a model's transformers config says so, else ``fused``."""
    return "eager" if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager" else "fused"


def activation_bytes(model: nn.Module, example_inputs: Any) -> int:
    """Return the bytes that autograd keeps between forward and backward, without parameters and buffers.

    Example:
        >>> activation_bytes(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.ones(2, 8))
        96
    """
    device = next(model.parameters()).device
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example_inputs)
    # Parameters and buffers exist anyway. Compare storages to recognize views of them.
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # hold the storages, so that no address is reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    # Train mode, so that dropout masks are counted.
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        call(model.train(), inputs)
    return sum(storage.nbytes() for storage in kept.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Plan:
    """Memory per device, its peak, and the bytes sent per optimizer step."""

    costs: tuple[Cost, ...]

    @property
    def held(self) -> float:
        """Bytes that stay from step to step."""
        return sum(cost.held for cost in self.costs)

    @property
    def peak(self) -> float:
        """Upper bound of the peak in bytes: all that is held, plus all that lives within a step."""
        return self.held + sum(cost.during for cost in self.costs)

    @property
    def host(self) -> float:
        """Bytes that stay in the host's memory, per rank."""
        return sum(cost.host for cost in self.costs)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in an optimizer step."""
        return sum(cost.sent for cost in self.costs)


def plan(shape: ModelShape, run: PlannedRun, recipe: Mapping[str, TechniqueConfig] | None = None) -> Plan:
    """Return what a run needs per device.

    With P parameters of w bytes, N = R ranks under FSDP2 (else 1), T tokens per forward, L blocks of width h,
    V tokens in the vocabulary, c bytes per computed value, A micro-batches per step:

    - held: ``P·w/N`` weights, ``P·m/N`` moments, and DDP's buckets ``P·w``;
    - within a step: ``P·w/N`` gradients, ``a·T·L·h`` activations (a = 42 in 16 bit, 54 mixed, 79 in fp32: measured
      on Llama), plus ``3·c·T·L·s·heads`` scores of s tokens with eager attention, ``T·V·(c + 8)`` logits; under
      FSDP2 also two gathered blocks, the gradients of one, embeddings and head; in mixed precision without FSDP2 also
      16-bit copies of the blocks' weights;
    - sent: DDP ``2·(R-1)/R·P·w``; FSDP2 ``(R-1)/R·c`` bytes per parameter, A times: to gather all in forward, blocks
      again in backward, and to reduce gradients.

    Args:
        shape: Sizes of the model.
        run: Settings of the run.
        recipe: Techniques by key.

    Raises:
        ConfigError: If attention is eager and `shape` has no heads.

    Source: Korthikanti et al., 2022, arXiv:2205.05198, equation 2 for activations; Rajbhandari et al., 2020,
    arXiv:1910.02054, section 7 for traffic.

    Example:
        >>> run = PlannedRun(ranks=64, strategy="fsdp2", seq_len=4096)
        >>> needs = plan(ModelShape.of_params(70e9), run)
        >>> round(needs.held / 2**30, 1), round(needs.peak / 2**30), round(needs.sent / 1e9)
        (12.2, 156, 412)
    """
    if run.attention == "eager" and not shape.heads:
        raise ConfigError("plan", "heads must be given with eager attention, got 0", "set heads of ModelShape")
    recipe = recipe or {}
    for config in recipe.values():
        shape = reshaped(config, shape)
    own = [cost for config in recipe.values() for cost in memory_costs(config, shape, run)]
    return Plan((*_base(shape, run, _shared_sizes(recipe, shape, run)), *own))


def _shared_sizes(recipe: Mapping[str, TechniqueConfig], shape: ModelShape, run: PlannedRun) -> SharedSizes:
    sizes = SharedSizes.of(shape, run)
    for key in in_order(recipe):
        sizes = resized(recipe[key], sizes, shape, run)
    return sizes


def _base(shape: ModelShape, run: PlannedRun, sizes: SharedSizes) -> list[Cost]:
    learned, computed = sizes.trained, run.compute_bytes
    gradients = learned * run.weight_bytes
    scores = " + 3·c·T·L·s·heads with eager attention" if run.attention == "eager" else ""
    costs = [
        Cost("weights", held=sizes.weights / run.parts, why="P·w/N"),
        Cost(f"moments of {run.optimizer}", held=learned * run.moment_bytes / run.parts, why="P·m/N"),
        Cost("gradients", during=gradients / run.parts, why="P·w/N"),
        Cost("activations", during=sizes.activations, host=sizes.on_host, why=f"a·T·L·h{scores}"),
    ]
    if sizes.logits:
        costs.append(Cost("logits", during=sizes.logits, why="T·V·(c + 8)"))
    if run.strategy == "ddp":
        # DDP's buckets hold a copy of all gradients.
        sent, why = 2 * run.ring(gradients), "buckets P·w; one all-reduce per step, 2·(R-1)/R·P·w"
        costs.append(Cost("DDP", held=gradients, sent=sent, why=why))
    if run.strategy == "fsdp2":
        # While one block is computed, the next is gathered, and one block's gradients wait for their reduction.
        around = computed * (3 * shape.block + shape.embeddings)
        # Forward and backward gather blocks once each. Weights outside blocks stay gathered. Gradients are scattered
        # once.
        passes = computed * (2 * shape.matrices + shape.embeddings + learned)
        why = "two gathered blocks, gradients of one, weights outside blocks; (R-1)/R·c·(2·P_blocks + P_rest + P)·A"
        costs.append(Cost("FSDP2", during=around, sent=run.accumulate * run.ring(passes), why=why))
    elif run.precision == "mixed":
        costs.append(Cost("autocast", during=2.0 * shape.matrices, why="16-bit copies of the blocks' weights"))
    return costs
