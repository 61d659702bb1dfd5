"""What cannot be combined, and why: technique × technique and technique × environment, checked at start.

One table; further rules depend on a technique's own options, or on what a front end reports of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shared_core.engine.registry import ROOMS
from shared_core.errors import CompatibilityError

SURROUNDINGS = {
    "bf16": "plain bf16 mixed precision",
    "fp16": "fp16 mixed precision",
    "deepspeed": "DeepSpeed",
    "zero3": "DeepSpeed ZeRO stage 3",
    "fsdp1": "FSDP version 1",
    "fsdp2": "FSDP version 2",
    "lbfgs": "an LBFGS optimizer",
    "manual_optimization": "Lightning's manual optimisation",
    "several_optimizers": "more than one optimizer",
    "data_parallel": "torch.nn.DataParallel",
    "unequal_ranks": "average_tokens_across_devices=False with several processes",
    "tensor_parallel": "tensor parallelism, or a model that was sharded while it was loaded",
    "peft": "a model of PEFT",
    "tpu": "XLA",
    "averaging_callback": "another callback that averages weights",
    "pruning_callback": "Lightning's ModelPruning",
    "trainer_checkpointing": "the trainer's own activation checkpointing",
}


# Masks, clusters, copies and quantisers that belong to single parameters.
_HOLDS_WEIGHTS = ("primary_weights", "prune", "cluster", "qat", "fp8")

_NOT_MUTUAL = {
    "lora": "peers train whole models from newly drawn weights, which adapters over a frozen base do not",
    "primary_weights": "peers have no float32 copies, and updates of their 16-bit weights would round away; load the "
    "model in float32",
}


def by_option(recipe: Mapping[str, Any], surroundings: Iterable[str]) -> list[str]:
    """Return a line for each technique that is refused, or needs another, because of an option of its own."""
    lines = []
    scaling = recipe.get("loss_scale")
    if scaling is not None and scaling.flush_every:
        lines += [
            f"loss_scale with flush_every cannot be combined with {SURROUNDINGS[sharded]}: the backward that it "
            "repeats does not gather sharded weights; histogram_every shows small gradients too"
            for sharded in ("fsdp1", "fsdp2")
            if sharded in surroundings
        ]
        if "checkpointing" in recipe:
            lines.append(
                "loss_scale with flush_every cannot be combined with checkpointing: the backward that it repeats "
                "counts every forward of a layer, recomputed ones too; histogram_every shows small gradients as well"
            )
    prune = recipe.get("prune")
    checkpointing = recipe.get("checkpointing")
    if checkpointing is not None and "fsdp2" in surroundings and checkpointing.has_budget:
        lines.append(
            f"checkpointing with a budget cannot be combined with {SURROUNDINGS['fsdp2']}: the profile would count "
            "gathered weights as activations; take policy block, or plan on one device and name the blocks in include"
        )
    if prune is not None and "fsdp2" in surroundings and prune.why_not_sharded:
        lines.append(f"prune cannot be combined with {SURROUNDINGS['fsdp2']}: {prune.why_not_sharded}")
    low_rank = recipe.get("low_rank")
    if low_rank is not None and "fsdp2" in surroundings and low_rank.merge:
        lines.append(
            f"low_rank with merge cannot be combined with {SURROUNDINGS['fsdp2']}, which has sharded the factors and "
            "gathers no weights beside them; leave merge out, and call shared_core.low_rank.merge on the loaded model"
        )
    lora = recipe.get("lora")
    if lora is not None and "fsdp2" in surroundings and lora.base != "none":
        lines.append(
            f"lora with base {lora.base} cannot be combined with {SURROUNDINGS['fsdp2']}, which would cut the codes of "
            "bitsandbytes apart from their scales; take base none"
        )
    distill = recipe.get("distill")
    if distill is not None and "fsdp2" in surroundings and distill.why_not_sharded:
        lines.append(f"distill cannot be combined with {SURROUNDINGS['fsdp2']}: {distill.why_not_sharded}")
    comm = recipe.get("comm")
    if comm is not None and comm.hook == "powersgd" and "fsdp2" in surroundings:
        lines.append(
            f"comm with hook powersgd cannot be combined with {SURROUNDINGS['fsdp2']}: its products average whole "
            "gradients on every process, of which FSDP2 wants a part on each; take hook bf16 or fp16"
        )
    if comm is not None and comm.hook == "powersgd":
        lines += [
            f"comm with hook powersgd cannot be combined with {SURROUNDINGS.get(other, other)}: what it lost of a "
            "gradient is kept in units of the loss scale, which changes; take hook bf16 or fp16, or train in bf16"
            for other in ("loss_scale", "fp16")
            if other in recipe or other in surroundings
        ]
    if distill is not None and "deepspeed" in surroundings and distill.needs_whole_weights:
        lines.append(
            f"distill with these options cannot be combined with {SURROUNDINGS['deepspeed']}: averages, other "
            "students, projections, copied layers and heads in chunks need whole weights; leave out teacher ema and "
            "mutual, hidden, attention, init_layers and chunked, or use DDP"
        )
    if prune is not None and prune.straight_through and "primary_weights" in recipe:
        lines.append(
            "prune with movement, recompute or sr_ste cannot be combined with primary_weights: both keep other weights "
            "than the model holds for the optimizer; load the model in float32"
        )
    if "dp" in recipe and prune is not None and not prune.sees_weights_alone:
        lines.append(
            "dp with these options of prune cannot be combined: what they see of gradients and activations of single "
            "examples is not accounted for; take criterion magnitude, threshold or random of single weights, n_m or "
            "blocks"
        )
    if "dp" in recipe and distill is not None and not distill.works_on_single_examples:
        lines.append(
            "dp with these options of distill cannot be combined: other students, projections, relations between "
            "examples and heads in chunks are trained past the gradients of single examples; leave out teacher mutual, "
            "hidden, attention, chunked and unlabelled_field"
        )
    low_rank, activations = recipe.get("low_rank"), recipe.get("activations")
    if "dp" in recipe and low_rank is not None and low_rank.needs_batches:
        lines.append(
            f"dp with decomposition {low_rank.decomposition} of low_rank cannot be combined: factors are made from "
            "inputs of single examples, which no noise hides; take decomposition svd, which looks at weights alone"
        )
    if "dp" in recipe and activations is not None and activations.rounds:
        lines.append(
            f"dp with pack {activations.pack} of activations cannot be combined: the rules for single examples keep "
            "the inputs of layers whole, so that rounding saves nothing, and where neighbours share a scale one "
            "example changes the gradients of others; pack exact"
        )
    average = recipe.get("average")
    if prune is not None and prune.criterion == "wanda" and average is not None and average.bn_batches:
        lines.append(
            "prune with criterion wanda cannot be combined with bn_batches of average: it would count the batches on "
            "which statistics are estimated; leave bn_batches at 0, which averages them"
        )
    fp8, qat, ticket = recipe.get("fp8"), recipe.get("qat"), recipe.get("lottery")
    if qat is not None and ticket is not None and ticket.rewind != "weights":
        lines.append(
            f"ticket with rewind {ticket.rewind} cannot be combined with qat: at step k the ranges are those of the "
            "replay, not of the trained weights that are put in place; rewind weights, or quantise the winning ticket"
        )
    if fp8 is not None and fp8.needs_loss_scaling and "loss_scale" not in recipe:
        lines.append(
            f"fp8 with recipe {fp8.recipe} needs loss_scale: gradients are cast without a scale of their own, and "
            "small ones would vanish; add --loss_scale_kind dynamic --loss_scale_format fp8_e5m2"
        )
    distill = recipe.get("distill")
    for key, reason in _NOT_MUTUAL.items():
        if distill is not None and distill.mutual and key in recipe:
            lines.append(f"distill with teacher mutual cannot be combined with {key}: {reason}")
    if activations is not None and activations.rounds and "checkpointing" in recipe:
        lines.append(
            f"activations with pack {activations.pack} cannot be combined with checkpointing: a region keeps its "
            "inputs alone, and computed again from rounded ones it would not be what forward was; pack exact"
        )
    if activations is not None and checkpointing is not None and checkpointing.has_budget:
        lines.append(
            "activations cannot be combined with a budget of checkpointing: its profile sees activations as they are, "
            "and would recompute what is stored in fewer bytes; take policy every_k, sublayer or selective"
        )
    if qat is not None and qat.keep and "lora" in recipe:
        lines.append(
            "qat with keep cannot be combined with lora: adapters are merged into plain layers at the end; "
            "apply_ranges puts quantisers back into these"
        )
    if "soup" in recipe and {"peft", "fsdp2"} <= {*surroundings}:
        lines.append(
            f"soup of {SURROUNDINGS['peft']} cannot be combined with {SURROUNDINGS['fsdp2']}: averages of adapters "
            "have other ranks, and FSDP2 keeps shapes that it has sharded; average the saved adapters with `eff soup`"
        )
    if "soup" in recipe and "peft" in surroundings:
        lines += [
            f"soup of {SURROUNDINGS['peft']} cannot be combined with {key}: what it holds of the adapters is of other "
            "shapes than those of their averages; average the saved adapters with `eff soup`"
            for key in _HOLDS_WEIGHTS
            if key in recipe
        ]
    if qat is not None and qat.range in ("lsq", "lsq_plus", "pact"):
        lines += [
            f"qat with range {qat.range} cannot be combined with {key}: the average of weights has no learned scales "
            "of its own; use an observed range, such as ema, which is estimated anew for it"
            for key in ("average", "soup")
            if key in recipe
        ]
    if "manual_optimization" in surroundings:
        lines += _calibrating(recipe)
    return lines


def _calibrating(recipe: Mapping[str, Any]) -> list[str]:
    """Return a line for whatever runs training batches without a step, which such a training_step would take itself."""
    manual = SURROUNDINGS["manual_optimization"]
    averages = [key for key in ("average", "soup") if key in recipe]
    lines = [
        f"{key} with bn_batches cannot be combined with {manual}: statistics are estimated by training_step, which "
        "steps the optimizer; leave bn_batches at 0"
        for key in averages
        if recipe[key].bn_batches
    ]
    if "qat" in recipe and recipe["qat"].observes_activations:
        lines += [
            f"{key} with ranges of qat cannot be combined with {manual}: averaged weights need new ranges, which "
            "training_step would estimate, and it steps the optimizer; take scheme int8_dynamic or int8_weight"
            for key in averages
        ]
    return lines


_FLAT = "flat shards of FSDP1 have no rows, channels or names left to decide on; use DDP"
_OWN = "DeepSpeed partitions the optimizer and scales the loss by itself; use DDP"
_FACTORS_STAY = "It is allowed with low_rank merge false, where the model stays factorised"
_REWOUND = (
    "weights are rewound at step k, and the next masks come from those that were trained; average the winning ticket's "
    "own run"
)
_COPIED = (
    "before its layers are changed, and would average other tensors than are trained; the technique average does both"
)
_PRUNED = "it replaces the weights by masks and weights of its own; the technique prune does what it does"
# Techniques that neither hold weights nor say anything of them.
_NO_WEIGHTS = ("matmul", "checkpointing", "activations", "distill", "loss_scale", "comm")
_LBFGS = "LBFGS moves the weights many times in one step, and nothing holds in between; use another optimizer"

# (recipe key, other recipe key or surrounding) → reason. What is not listed is allowed and tested as a pair.
REFUSED: dict[tuple[str, str], str] = {
    ("loss_scale", "bf16"): (
        "bf16 has fp32's exponent range, so gradients do not underflow and a scale only adds skipped steps; "
        "drop loss_scale or train in fp16. It is allowed where fp8 casts gradients to e5m2, whose range is narrower: "
        "fp8 recipe tensorwise, delayed or hfp8 with loss_scale format fp8_e5m2"
    ),
    ("loss_scale", "deepspeed"): _OWN,
    ("loss_scale", "fsdp1"): "FSDP1 has a scaler of its own, which joins the ranks' overflows; use FSDP2 or DDP",
    (
        "loss_scale",
        "lbfgs",
    ): "LBFGS evaluates its closure many times a step and cannot skip one; use another optimizer",
    ("loss_scale", "manual_optimization"): (
        "with manual optimisation your code calls optimizer.step itself; pass LossScaler to it directly"
    ),
    ("lora", "prune"): (
        "the base is frozen, in codes that no mask can hold, and merging the adapters would fill its zeros again; "
        "prune the merged model afterwards"
    ),
    ("lora", "qat"): (
        "the frozen weights are codes of bitsandbytes already, on a grid of their own. It is allowed with lora base "
        "none: adapters in float are then trained on weights that qat quantises, in 4 bits with scheme int4_weight, "
        "mxfp4 or nvfp4"
    ),
    ("lora", "fp8"): "both replace the same linear layers, and the frozen weights are 4-bit codes already; drop one",
    ("lora", "soup"): (
        "requantize puts the merged weights on the base's grid, which an average of them leaves. It is allowed "
        "without: the model then holds the average of the merged weights"
    ),
    ("lora", "deepspeed"): _OWN,
    ("lora", "fsdp1"): "flat shards of FSDP1 mix frozen codes with trained floats; use DDP",
    ("lora", "lbfgs"): _LBFGS,
    ("low_rank", "lora"): (
        "adapters would sit on factors that are trained themselves; train with low_rank first, or factorise the merged "
        "model with `eff low-rank`"
    ),
    ("low_rank", "lottery"): (
        "the ticket's masks are of whole weights, which factorised layers do not have; factorise the winning ticket "
        "with `eff low-rank`"
    ),
    ("low_rank", "prune"): f"the product of two sparse factors is dense. {_FACTORS_STAY}",
    ("low_rank", "cluster"): f"the product of two factors has other values than they. {_FACTORS_STAY}",
    ("low_rank", "qat"): f"the product of two quantised factors lies on no grid. {_FACTORS_STAY}",
    ("low_rank", "deepspeed"): _OWN,
    ("low_rank", "fsdp1"): _FLAT,
    ("low_rank", "peft"): (
        "what is saved of it are adapters alone, without the factors that they were trained over; factorise before the "
        "adapters are added, or merge them first"
    ),
    ("primary_weights", "deepspeed"): _OWN,
    ("primary_weights", "fsdp1"): _FLAT,
    ("primary_weights", "lbfgs"): _LBFGS,
    ("prune", "deepspeed"): _OWN,
    ("prune", "fsdp1"): _FLAT,
    ("prune", "lbfgs"): _LBFGS,
    ("lottery", "prune"): (
        "a round's masks come from its ticket alone; drop prune, or prune the winning ticket further on its own"
    ),
    ("lottery", "lora"): (
        "the base is frozen, in codes that no mask can hold, and the next masks come from trained weights; find "
        "tickets of the whole model"
    ),
    ("lottery", "primary_weights"): (
        "the float32 copies would train on from before the rewinding; load the model in float32"
    ),
    ("lottery", "soup"): (
        "the next masks come from the weights of one run's end, and checkpoints from before step k are dense; soup the "
        "winning ticket's own runs with `eff soup`"
    ),
    ("lottery", "deepspeed"): _OWN,
    ("lottery", "fsdp1"): _FLAT,
    ("lottery", "lbfgs"): _LBFGS,
    ("cluster", "lora"): (
        "the base is frozen, and merging the adapters would move members of a cluster apart; merge, then share the "
        "weights in a run of its own, or let `eff compress` do it"
    ),
    ("cluster", "qat"): (
        "qat bakes weights on grids with a scale for each channel, where members of a cluster come apart; drop one"
    ),
    ("cluster", "lottery"): (
        "the next masks rank magnitudes, and sharing makes most of them equal; share the weights of the winning ticket"
    ),
    ("cluster", "deepspeed"): _OWN,
    ("cluster", "fsdp1"): _FLAT,
    ("cluster", "lbfgs"): _LBFGS,
    ("qat", "deepspeed"): _OWN,
    ("qat", "fsdp1"): _FLAT,
    ("qat", "lbfgs"): _LBFGS,
    ("qat", "fp8"): (
        "both change the class of the same linear layers, and int8 rounding inside an FP8 product is neither; "
        "train in FP8 first and then for int8, or drop one"
    ),
    ("fp8", "deepspeed"): _OWN,
    ("fp8", "fsdp1"): "flat shards of FSDP1 have no rows or blocks left that could share a scale; use DDP",
    ("fp8", "lbfgs"): _LBFGS,
    ("distill", "manual_optimization"): (
        "training_step returns no loss that a soft term could join; call shared_core.distillation.kd_loss in it"
    ),
    ("distill", "unequal_ranks"): (
        "the soft term would be averaged per rank while the label count differs between ranks; "
        "leave average_tokens_across_devices at True"
    ),
    (
        "distill",
        "lbfgs",
    ): "LBFGS evaluates its closure many times a step, and the teacher with it; use another optimizer",
    ("checkpointing", "trainer_checkpointing"): (
        "blocks would be recomputed twice; switch the trainer's off (gradient_checkpointing or "
        "activation_checkpointing of transformers: policy block does the same, every_k as its every_n_layers)"
    ),
    (
        "checkpointing",
        "deepspeed",
    ): "DeepSpeed partitions weights by hooks of its own; use its activation checkpointing",
    ("checkpointing", "fsdp1"): "flat shards of FSDP1 have not been run with it; use FSDP version 2, or its own policy",
    ("distill", "zero3"): (
        "a teacher that is loaded under stage 3 is cut into parts that nothing gathers; use stage 1 or 2, with "
        "offload_optimizer where memory is short"
    ),
    ("distill", "fsdp1"): "the teacher is not prepared under FSDP1; use DDP",
    ("comm", "deepspeed"): "DeepSpeed reduces gradients itself; its own communication_data_type sends 16 bits",
    ("comm", "fsdp1"): "FSDP reduces gradients itself; its mixed precision's reduce_dtype sends 16 bits",
    ("comm", "lbfgs"): "its line search compares gradients, and inexact ones mislead it; use another optimizer",
    ("average", "lottery"): _REWOUND,
    ("average", "deepspeed"): "DeepSpeed keeps the weights in parts of its own; use DDP or FSDP version 2",
    ("average", "fsdp1"): _FLAT,
    ("activations", "deepspeed"): (
        "it gathers weights into buffers that cannot be told from activations, and offloads by itself; use its own "
        "activation checkpointing, or DDP"
    ),
    ("activations", "fsdp1"): (
        "weights are views of flat buffers that cannot be told from activations; use DDP or FSDP version 2"
    ),
    ("dp", "lora"): (
        "Opacus has no rule for a layer that adds adapters to frozen codes; leave the adapters out, and freeze what "
        "is not to be trained"
    ),
    ("dp", "primary_weights"): (
        "a gradient in 16 bits rounds the noise, which is then not what is accounted for; load the model in float32"
    ),
    ("dp", "lottery"): "every round sees the data again, and rounds are not accounted for together; train one model",
    ("dp", "cluster"): (
        "members of a cluster are moved by one sum of their gradients, on which noise has not been tested; share the "
        "weights of the trained model with `eff compress`"
    ),
    ("dp", "qat"): (
        "observers keep ranges of activations, which single examples set and no noise hides; train privately, then "
        "quantise the weights with `eff quantize`"
    ),
    ("dp", "fp8"): (
        "scales come from the largest values of a batch, which single examples set and no noise hides; train in bf16"
    ),
    ("dp", "loss_scale"): (
        "a scaler skips steps on which single examples overflow, and skips are not accounted for; train in float32 or "
        "bf16"
    ),
    ("dp", "fp16"): (
        "its scaler skips steps on which single examples overflow, and skips are not accounted for; train in float32 "
        "or bf16"
    ),
    ("dp", "checkpointing"): (
        "a recomputed forward would hand the layers' inputs to the rules for single examples twice; take "
        "smaller micro-batches and accumulate more, which changes nothing"
    ),
    ("dp", "comm"): "noised sums are joined by it, not by DDP, so that no hook would see them; drop comm",
    ("dp", "deepspeed"): _OWN,
    ("dp", "fsdp1"): "flat shards of FSDP1 have no gradient of one example; use DDP",
    ("dp", "lbfgs"): _LBFGS,
    ("dp", "manual_optimization"): (
        "your code steps the optimizer itself, so nothing tells which batches a step has; use automatic optimisation"
    ),
    ("dp", "several_optimizers"): "each step must be one draw over all parameters; use one optimizer with groups",
    **{
        (key, "averaging_callback"): "each would put its own weights into the model for validation; keep one of them"
        for key in ("average", "soup")
    },
    ("lottery", "averaging_callback"): _REWOUND,
    ("qat", "averaging_callback"): (
        "ranges are observed on the weights in training, and an average lies between the codes; the technique average "
        "does both"
    ),
    **{(key, "averaging_callback"): _COPIED for key in ("lora", "low_rank")},
    **{(key, "pruning_callback"): _PRUNED for key in ROOMS if key not in _NO_WEIGHTS},
    ("soup", "deepspeed"): _OWN,
    ("soup", "fsdp1"): "candidates are whole models; soup the saved checkpoints with `eff soup` instead",
    **{
        (
            key,
            "data_parallel",
        ): "DataParallel replicates modules anew every forward and loses what they record; "
        "start one process per device (torchrun)"
        for key in ROOMS
    },
    **{
        (key, "tensor_parallel"): "its layers hold parts of a weight in forward too, and it has not been run with "
        "them; use DDP or FSDP version 2"
        for key in ROOMS
        if key != "matmul"
    },
    **{(key, "tpu"): "it has not been run on XLA devices" for key in ROOMS},
}


def _scales_e5m2(recipe: Mapping[str, Any]) -> bool:
    fp8 = recipe.get("fp8")
    return fp8 is not None and fp8.backward_is_narrow and recipe["loss_scale"].format == "fp8_e5m2"


# A refused pair → what a recipe must hold for it to be allowed all the same; the reason tells it in words.
ALLOWED_IF: dict[tuple[str, str], Callable[[Mapping[str, Any]], bool]] = {
    ("loss_scale", "bf16"): _scales_e5m2,
    ("lora", "qat"): lambda recipe: recipe["lora"].base == "none",
    ("lora", "soup"): lambda recipe: not recipe["lora"].requantize,
    **{("low_rank", key): lambda recipe: not recipe["low_rank"].merge for key in ("prune", "cluster", "qat")},
}


def remarks(recipe: Mapping[str, Any]) -> list[str]:
    """Return what is allowed and yet has to be told: a line each, for the user and the receipt."""
    lines = []
    if "dp" in recipe and "distill" in recipe:
        lines.append(
            "dp: what the teacher learned from these data is outside the guarantee; it holds for a teacher that never "
            "saw them"
        )
    if "dp" in recipe and "low_rank" in recipe and recipe["low_rank"].rule.kind == "report":
        lines.append(
            "dp: what a report of eff low-rank saw of these data is outside the guarantee; it holds for ranks that were"
            " found on others"
        )
    if "dp" in recipe and "soup" in recipe:
        lines.append(
            "dp: a soup is chosen by the validation data, which are outside the guarantee; it covers the training data"
        )
    return lines


def refusal(first: str, second: str) -> str | None:
    """Return why two techniques, or a technique and a surrounding, cannot be combined; None if they can.

    The reason also tells the options under which they can, if there are such.

    Example:
        >>> refusal("prune", "qat") is None, refusal("loss_scale", "bf16") is None
        (True, False)
    """
    return REFUSED.get((first, second)) or REFUSED.get((second, first))


def check(keys: Iterable[str], surroundings: Iterable[str] = ()) -> None:
    """Refuse a combination that cannot be right, before any work.

    Args:
        keys: A recipe, whose options decide too, or recipe keys alone, which meet no condition.
        surroundings: Keys of `SURROUNDINGS` that hold.

    Raises:
        CompatibilityError: Naming both sides and the reason, for every refused pair, and what a recipe lacks.
    """
    recipe = keys if isinstance(keys, Mapping) else None
    keys, surroundings = list(keys), list(surroundings)
    pairs = [*itertools.combinations(keys, 2), *itertools.product(keys, surroundings)]
    lines = [
        f"{first} cannot be combined with {SURROUNDINGS.get(second, second)}: {reason}"
        for first, second in pairs
        if (reason := refusal(first, second)) and not _is_allowed(first, second, recipe)
    ]
    lines += by_option(recipe, surroundings) if recipe is not None else []
    if lines:
        raise CompatibilityError("recipe: " + "\n".join(lines))


def _is_allowed(first: str, second: str, recipe: Mapping[str, Any] | None) -> bool:
    condition = ALLOWED_IF.get((first, second)) or ALLOWED_IF.get((second, first))
    return recipe is not None and condition is not None and condition(recipe)


def matrix() -> list[dict[str, str]]:
    """Return one row a technique, one column a technique or surrounding: ``"yes"`` or the reason why not."""
    columns = [*ROOMS, *SURROUNDINGS]
    return [
        {
            "technique": key,
            **{column: "-" if column == key else refusal(key, column) or "yes" for column in columns},
        }
        for key in ROOMS
    ]
