"""What a run needs of each device: weights, gradients, moments, activations, traffic, and each technique's own."""

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
from shared_core.distillation.config import DistillConfig
from shared_core.engine.registry import in_order
from shared_core.errors import ConfigError
from shared_core.fp8.config import Fp8Config
from shared_core.gradient_compression.config import CommConfig
from shared_core.lora.config import LoraConfig
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.low_rank.config import LowRankConfig
from shared_core.modules.calls import call
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
    """Return what a technique adds to a run's memory and traffic, or takes away."""
    return [Cost(config.key, why=_NOT_COUNTED.get(config.key, "not counted: there is no formula for it"))]


@singledispatch
def resized(config: TechniqueConfig, sizes: SharedSizes, shape: ModelShape, run: PlannedRun) -> SharedSizes:
    """Return what a technique makes of that which is counted once for all techniques."""
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


def counted_costs(
    model: nn.Module,
    run: PlannedRun,
    recipe: Mapping[str, TechniqueConfig],
    *,
    touched: Mapping[str, int],
    shape: ModelShape | None = None,
    activations: int | str | None = None,
) -> list[Cost]:
    """Return what a run needs of one device: weights, gradients and moments counted, techniques by formula.

    Example:
        >>> costs = counted_costs(nn.Linear(8, 4, bias=False), PlannedRun(), {}, touched={}, activations=64)
        >>> {cost.what: cost.held + cost.during for cost in costs}
        {'weights': 128.0, 'moments of adamw': 256.0, 'gradients': 128.0, 'activations': 64.0}
    """
    parameters = list(model.parameters())
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    # Moments in the weights' own bytes, and what an optimizer keeps beside them in fixed bytes an element.
    beside = run.moment_bytes - run.moments * run.weight_bytes
    moments = sum(run.moments * parameter.nbytes + beside * parameter.numel() for parameter in learned)
    costs = [
        Cost("weights", held=float(_bytes([*parameters, *model.buffers()])), why="counted, buffers too"),
        Cost(f"moments of {run.optimizer}", held=moments, why="of what has a gradient"),
        Cost("gradients", during=float(_bytes(learned)), why="counted"),
    ]
    if isinstance(activations, str):
        costs.append(Cost("activations", why=f"not told: {activations}"))
    elif activations is not None:
        costs.append(Cost("activations", during=float(activations), why="what autograd keeps of the example inputs"))
    elif shape is not None:
        run = replace(run, attention=attention_of(model))
        sizes = _shared_sizes(recipe, shape, run)
        scores = " + 3·c·T·L·s·heads" if run.attention == "eager" else ""
        why = f"a·T·L·h{scores} of {run.tokens:,} tokens; logits T·V·(c + 8)"
        during = sizes.activations + sizes.logits
        costs.append(Cost("activations and logits", during=during, host=sizes.on_host, why=why))
    else:
        why = "not told: return (model, example_inputs) from the function, or give a folder of a language model"
        costs.append(Cost("activations", why=why))
    number = sum(parameter.numel() for parameter in parameters)
    for key, config in recipe.items():
        # Formulas go by layers and hidden size; for a model that is there, one layer of all its parameters gives the
        # count, and what a technique does not touch goes as embeddings, which its formulas leave alone.
        rest = max(number - touched.get(key, 0), 0)
        own = ModelShape(params=number, layers=1, hidden=1, vocab=rest, embeddings=rest)
        # logits go by the model's vocabulary, and not by the parameters that the technique touches
        costs += memory_costs(config, shape if key == "distill" and shape is not None else own, run)
    return costs


def attention_of(model: nn.Module) -> Attention:
    """Return ``eager`` if transformers notes so in a model's config, else ``fused``."""
    return "eager" if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager" else "fused"


def saved_bytes(model: nn.Module, example_inputs: Any) -> int:
    """Return the bytes that autograd keeps between forward and backward, parameters and buffers left out.

    Example:
        >>> saved_bytes(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.ones(2, 8))
        96
    """
    device = next(model.parameters()).device
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example_inputs)
    # Parameters and buffers are there anyway. Their storages, so that views of them are known.
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # storages are held, so that no other takes the address of one that was released

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    # Train mode: dropout masks are kept, too.
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        call(model.train(), inputs)
    return sum(storage.nbytes() for storage in kept.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Plan:
    """The memory of each device, its worst moment, and the bytes that it sends in an optimizer step."""

    costs: tuple[Cost, ...]

    @property
    def held(self) -> float:
        """Bytes that stay from step to step."""
        return sum(cost.held for cost in self.costs)

    @property
    def peak(self) -> float:
        """Bytes at the worst moment: all that is held, and all that lives within a step at once, which is a bound."""
        return self.held + sum(cost.during for cost in self.costs)

    @property
    def host(self) -> float:
        """Bytes that stay in the host's memory, a rank."""
        return sum(cost.host for cost in self.costs)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in an optimizer step."""
        return sum(cost.sent for cost in self.costs)


def plan(shape: ModelShape, run: PlannedRun, recipe: Mapping[str, TechniqueConfig] | None = None) -> Plan:
    """Return what a run needs of each device.

    With P parameters in w bytes, N = R ranks that cut under FSDP2 (else 1), T tokens a forward, L blocks of width h,
    V tokens in the vocabulary, c bytes a computed value, A micro-batches a step:

    - held: ``P·w/N`` weights, ``P·m/N`` moments, and DDP's buckets ``P·w``;
    - within a step: ``P·w/N`` gradients, ``a·T·L·h`` activations (a = 42 in 16 bit, 54 mixed, 79 in fp32: measured
      on Llama), with ``3·c·T·L·s·heads`` scores of s tokens where attention is eager, ``T·V·(c + 8)`` logits; under
      FSDP2 two gathered blocks with one's gradients, embeddings and head; in mixed precision without FSDP2 16-bit
      copies of the blocks' weights;
    - sent: DDP ``2·(R-1)/R·P·w``; FSDP2 ``(R-1)/R·c`` bytes a parameter gathered in forward, again in backward for what
      lies in blocks, and reduced, A times.

    Args:
        shape: The model.
        run: How it is trained.
        recipe: Techniques by key.

    Raises:
        ConfigError: If attention is eager, and `shape` has no heads.

    Source: Korthikanti et al., 2022, arXiv:2205.05198, equation 2 for activations; Rajbhandari et al., 2020,
    arXiv:1910.02054, section 7 for traffic.

    Example:
        >>> run = PlannedRun(ranks=64, strategy="fsdp2", seq_len=4096)
        >>> needs = plan(ModelShape.of_params(70e9), run)
        >>> round(needs.held / 2**30, 1), round(needs.peak / 2**30), round(needs.sent / 1e9)
        (12.2, 156, 412)
    """
    if run.attention == "eager" and not shape.heads:
        raise ConfigError("plan", "heads must be given with eager attention, got 0", "say how many ModelShape has")
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
    scores = " + 3·c·T·L·s·heads, attention is eager" if run.attention == "eager" else ""
    costs = [
        Cost("weights", held=sizes.weights / run.parts, why="P·w/N"),
        Cost(f"moments of {run.optimizer}", held=learned * run.moment_bytes / run.parts, why="P·m/N"),
        Cost("gradients", during=gradients / run.parts, why="P·w/N"),
        Cost("activations", during=sizes.activations, host=sizes.on_host, why=f"a·T·L·h{scores}"),
    ]
    if sizes.logits:
        costs.append(Cost("logits", during=sizes.logits, why="T·V·(c + 8)"))
    if run.strategy == "ddp":
        # DDP's buckets are a copy of all gradients.
        sent, why = 2 * run.ring(gradients), "buckets P·w; all-reduced once a step, 2·(R-1)/R·P·w"
        costs.append(Cost("DDP", held=gradients, sent=sent, why=why))
    if run.strategy == "fsdp2":
        # While one block is computed the next is gathered, and one block's gradients wait to be reduced.
        around = computed * (3 * shape.block + shape.embeddings)
        # Forward and backward gather blocks once each; what lies outside blocks stays gathered; gradients are
        # scattered once.
        passes = computed * (2 * shape.matrices + shape.embeddings + learned)
        why = "two gathered blocks, gradients of one, what lies outside blocks; (R-1)/R·c·(2·P_blocks + P_rest + P)·A"
        costs.append(Cost("FSDP2", during=around, sent=run.accumulate * run.ring(passes), why=why))
    elif run.precision == "mixed":
        costs.append(Cost("autocast", during=2.0 * shape.matrices, why="16-bit copies of the blocks' weights"))
    return costs
