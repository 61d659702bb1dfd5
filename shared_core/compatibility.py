"""What cannot be combined, and why: technique × technique and technique × surroundings. One table, checked at start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

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
    "tpu": "XLA",
}

_SHARDED = "its whole-tensor decisions have not been proven on sharded parameters yet; use DDP"
_FLAT = "flat shards of FSDP1 have no rows, channels or names left to decide on; use DDP"
_OWN = "DeepSpeed partitions the optimizer and scales the loss by itself; use DDP"
_LBFGS = "LBFGS moves the weights many times in one step, and nothing holds in between; use another optimizer"

# (recipe key, other recipe key or surrounding) → reason. What is not listed is allowed and tested as a pair.
REFUSED: dict[tuple[str, str], str] = {
    ("loss_scale", "bf16"): (
        "bf16 has fp32's exponent range, so gradients do not underflow and a scale only adds skipped steps; "
        "drop loss_scale or train in fp16"
    ),
    ("loss_scale", "deepspeed"): _OWN,
    (
        "loss_scale",
        "lbfgs",
    ): "LBFGS evaluates its closure many times a step and cannot skip one; use another optimizer",
    ("loss_scale", "manual_optimization"): (
        "with manual optimisation your code calls optimizer.step itself; pass LossScaler to it directly"
    ),
    ("prune", "deepspeed"): _OWN,
    ("prune", "fsdp1"): _FLAT,
    ("prune", "fsdp2"): _SHARDED,
    ("prune", "lbfgs"): _LBFGS,
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
    ("fp8", "fsdp2"): "its scales have not been proven on sharded parameters yet; use DDP",
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
    ("distill", "fsdp2"): "the teacher is not prepared under FSDP2 yet; use DDP",
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
    **{(key, "tpu"): "it has not been run on XLA devices" for key in ROOMS},
}


def refusal(first: str, second: str) -> str | None:
    """Return why two techniques, or a technique and a surrounding, cannot be combined; None if they can.

    Example:
        >>> refusal("prune", "qat") is None, refusal("loss_scale", "bf16") is None
        (True, False)
    """
    return REFUSED.get((first, second)) or REFUSED.get((second, first))


def check(keys: Iterable[str], surroundings: Iterable[str] = ()) -> None:
    """Refuse a combination that cannot be right, before any work.

    Raises:
        CompatibilityError: Naming both sides and the reason, for every refused pair.
    """
    keys = list(keys)
    pairs = [*itertools.combinations(keys, 2), *itertools.product(keys, surroundings)]
    refused = [(first, second, reason) for first, second in pairs if (reason := refusal(first, second))]
    if refused:
        lines = [
            f"{first} cannot be combined with {SURROUNDINGS.get(second, second)}: {reason}"
            for first, second, reason in refused
        ]
        raise CompatibilityError("recipe: " + "\n".join(lines))


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
