"""Techniques that are refused, or need another, because of an option of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shared_core.surroundings import SURROUNDINGS

# Masks, clusters, copies and quantisers that belong to single parameters.
_HOLDS_WEIGHTS = ("primary_weights", "prune", "share", "qat", "fp8")

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
