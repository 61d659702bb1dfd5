"""What cannot be combined, and why: technique × technique and technique × surroundings. One table, checked at start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shared_core.errors import CompatibilityError
from shared_core.option_conflicts import by_option
from shared_core.rooms import ROOMS
from shared_core.surroundings import SURROUNDINGS as SURROUNDINGS

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
    ("low_rank", "ticket"): (
        "the ticket's masks are of whole weights, which factorised layers do not have; factorise the winning ticket "
        "with `eff low-rank`"
    ),
    ("low_rank", "prune"): f"the product of two sparse factors is dense. {_FACTORS_STAY}",
    ("low_rank", "share"): f"the product of two factors has other values than they. {_FACTORS_STAY}",
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
    ("share", "lbfgs"): _LBFGS,
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
    ("average", "ticket"): _REWOUND,
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
    ("dp", "ticket"): "every round sees the data again, and rounds are not accounted for together; train one model",
    ("dp", "share"): (
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
    ("ticket", "averaging_callback"): _REWOUND,
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
    **{("low_rank", key): lambda recipe: not recipe["low_rank"].merge for key in ("prune", "share", "qat")},
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
