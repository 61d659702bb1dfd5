"""What cannot be combined, and why: technique × technique and technique × surroundings. One table, checked at start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shared_core.errors import CompatibilityError
from shared_core.rooms import ROOMS

# What a front end reports of the run: precision, sharding, optimizer and control-flow facts that decide a refusal.
SURROUNDINGS = {
    "bf16": "plain bf16 mixed precision",
    "deepspeed": "DeepSpeed",
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
}

_SHARDED = "its whole-tensor decisions have not been proven on sharded parameters yet; use DDP"
_FLAT = "flat shards of FSDP1 have no rows, channels or names left to decide on; use DDP"
_OWN = "DeepSpeed partitions the optimizer and scales the loss by itself; use DDP"
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
    ("lora", "fsdp2"): "codes and their scales have not been run on sharded parameters yet; use DDP",
    ("lora", "lbfgs"): _LBFGS,
    ("primary_weights", "deepspeed"): _OWN,
    ("primary_weights", "fsdp1"): _FLAT,
    ("primary_weights", "fsdp2"): (
        "FSDP2 keeps an fp32 copy by itself: load the model in float32 and give it a mixed-precision policy"
    ),
    ("primary_weights", "lbfgs"): _LBFGS,
    ("prune", "deepspeed"): _OWN,
    ("prune", "fsdp1"): _FLAT,
    ("prune", "lbfgs"): _LBFGS,
    ("ticket", "prune"): (
        "a round's masks come from its ticket alone; drop prune, or prune the winning ticket further on its own"
    ),
    ("ticket", "lora"): (
        "the base is frozen, in codes that no mask can hold, and the next masks come from trained weights; find "
        "tickets of the whole model"
    ),
    ("ticket", "primary_weights"): (
        "the float32 copies would train on from before the rewinding; load the model in float32"
    ),
    ("ticket", "soup"): (
        "the next masks come from the weights of one run's end, and checkpoints from before step k are dense; soup the "
        "winning ticket's own runs with `eff soup`"
    ),
    ("ticket", "deepspeed"): _OWN,
    ("ticket", "fsdp1"): _FLAT,
    ("ticket", "fsdp2"): _SHARDED,
    ("ticket", "lbfgs"): _LBFGS,
    ("share", "lora"): (
        "the base is frozen, and merging the adapters would move members of a cluster apart; merge, then share the "
        "weights in a run of its own, or let `eff compress` do it"
    ),
    ("share", "qat"): (
        "qat bakes weights on grids with a scale for each channel, where members of a cluster come apart; drop one"
    ),
    ("share", "ticket"): (
        "the next masks rank magnitudes, and sharing makes most of them equal; share the weights of the winning ticket"
    ),
    ("share", "deepspeed"): _OWN,
    ("share", "fsdp1"): _FLAT,
    ("share", "fsdp2"): _SHARDED,
    ("share", "lbfgs"): _LBFGS,
    ("qat", "deepspeed"): _OWN,
    ("qat", "fsdp1"): _FLAT,
    ("qat", "fsdp2"): _SHARDED,
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
    ("distill", "deepspeed"): _OWN,
    ("distill", "fsdp1"): "the teacher is not prepared under FSDP1; use DDP",
    ("average", "ticket"): (
        "weights are rewound at step k, and the next masks come from those that were trained; average the winning "
        "ticket's own run"
    ),
    ("average", "deepspeed"): "DeepSpeed keeps the weights in parts of its own; use DDP or FSDP version 2",
    ("average", "fsdp1"): _FLAT,
    **{
        (key, "averaging_callback"): "each would put its own weights into the model for validation; keep one of them"
        for key in ("average", "soup")
    },
    ("soup", "deepspeed"): _OWN,
    ("soup", "fsdp1"): "candidates are whole models; soup the saved checkpoints with `eff soup` instead",
    ("soup", "fsdp2"): "candidates are whole models; soup the saved checkpoints with `eff soup` instead",
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
}


# Masks, clusters, copies and quantisers that belong to single parameters.
_HOLDS_WEIGHTS = ("primary_weights", "prune", "share", "qat", "fp8")

_NOT_MUTUAL = {
    "lora": "peers train whole models from newly drawn weights, which adapters over a frozen base do not",
    "primary_weights": "peers have no float32 copies, and updates of their 16-bit weights would round away; load the "
    "model in float32",
}


def _by_option(recipe: Mapping[str, Any], surroundings: Iterable[str]) -> list[str]:
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
    prune = recipe.get("prune")
    if prune is not None and "fsdp2" in surroundings and not prune.works_sharded:
        lines.append(
            f"prune with these options cannot be combined with {SURROUNDINGS['fsdp2']}: what they gather belongs to "
            "whole tensors; take criterion magnitude, threshold or random of single weights, n_m or blocks, or use DDP"
        )
    distill = recipe.get("distill")
    if distill is not None and "fsdp2" in surroundings and not distill.works_sharded:
        lines.append(
            f"distill with these options cannot be combined with {SURROUNDINGS['fsdp2']}: averages, other "
            "students, projections, copied layers and heads in chunks need whole weights; leave out teacher ema and "
            "mutual, hidden, attention, init_layers and chunked, or use DDP"
        )
    if prune is not None and prune.straight_through and "primary_weights" in recipe:
        lines.append(
            "prune with movement, recompute or sr_ste cannot be combined with primary_weights: both keep other weights "
            "than the model holds for the optimizer; load the model in float32"
        )
    average = recipe.get("average")
    if prune is not None and prune.criterion == "wanda" and average is not None and average.bn_batches:
        lines.append(
            "prune with criterion wanda cannot be combined with bn_batches of average: it would count the batches on "
            "which statistics are estimated; leave bn_batches at 0, which averages them"
        )
    fp8, qat, ticket = recipe.get("fp8"), recipe.get("qat"), recipe.get("ticket")
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
    if qat is not None and qat.keep and "lora" in recipe:
        lines.append(
            "qat with keep cannot be combined with lora: adapters are merged into plain layers at the end; "
            "apply_ranges puts quantisers back into these"
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
    lines += _by_option(recipe, surroundings) if recipe is not None else []
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
