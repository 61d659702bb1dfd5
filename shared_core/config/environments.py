"""Where a technique runs: its ability on a device, run environments, and shared reasons for conflicts with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from shared_core.errors import MissingExtraError


@dataclass(frozen=True)
class Ability:
    """How a technique runs on a device: natively, emulated, without effect, or not at all."""

    level: Literal["native", "emulated", "inactive", "refused"]
    why: str = ""


def missing(libraries: Mapping[str, str], where: str) -> MissingExtraError | None:
    """Return the error for the first library that is not installed, None if all are.

    Args:
        libraries: Library → the extra of efftrain that installs it.
        where: The start of the message.
    """
    absent = ((name, extra) for name, extra in libraries.items() if find_spec(name) is None)
    return next((MissingExtraError(where, *one) for one in absent), None)


RUN_ENVIRONMENTS = {
    "bf16": "plain bf16 mixed precision",
    "fp16": "fp16 mixed precision",
    "deepspeed": "DeepSpeed",
    "zero3": "DeepSpeed ZeRO stage 3",
    "deepspeed_fp16": "DeepSpeed in fp16",
    "lightning_deepspeed": "Lightning's DeepSpeedStrategy",
    "fsdp1": "FSDP version 1",
    "fsdp2": "FSDP version 2",
    "efficient_loading": "cpu_ram_efficient_loading of FSDP",
    "lbfgs": "an LBFGS optimizer",
    "manual_optimization": "Lightning's manual optimization",
    "several_optimizers": "more than one optimizer",
    "data_parallel": "torch.nn.DataParallel",
    "unequal_ranks": "average_tokens_across_devices=False with several processes",
    "tensor_parallel": "tensor parallelism, or a model that was sharded while loading",
    "sharded_by_user": "a model that was sharded before the trainer got it",
    "peft": "a PEFT model",
    "vllm_rollouts": "rollouts by vLLM",
    "tpu": "XLA",
    "averaging_callback": "another callback that averages weights",
    "pruning_callback": "Lightning's ModelPruning",
    "own_loop": "your own training loop (plain, Accelerate or Fabric)",
    "trainer_checkpointing": "the trainer's own activation checkpointing",
}
"""Run environments that a front end can report: key → name in messages."""

EVERY_TECHNIQUE = {
    "data_parallel": "DataParallel copies the modules for every forward and loses what they record; start one process "
    "per device with torchrun",
    "tensor_parallel": "layers hold only parts of a weight in the forward pass; use DDP or FSDP2",
    "sharded_by_user": "the trainer wraps the model in DDP, which needs whole weights; let the trainer shard it, or "
    "use your own training loop",
    "tpu": "it has not been tested on XLA devices",
    "deepspeed_fp16": "gradients are multiplied by DeepSpeed's own loss scale until the engine steps; train in bf16",
    "lightning_deepspeed": "it needs CUDA devices and has not been tested there; use DDP or FSDP2",
    "pruning_callback": "it replaces the weights by its own weights and masks; use the technique prune instead",
}
"""Environments that refuse every technique which does not list them in `works_in`, and why."""

DEEPSPEED = "DeepSpeed splits the optimizer and scales the loss itself; use DDP"
ZERO3 = "no process holds whole weights between forward passes; use stage 2 or FSDP2"
FSDP1 = "FSDP1 flattens the weights, so rows, channels and names are lost; use DDP or FSDP2"
EFFICIENT_LOADING = (
    "Accelerate would fill the sharded model from its state dict, which holds {}; set cpu_ram_efficient_loading to "
    "false in fsdp_config"
)
LBFGS = "LBFGS changes the weights many times in one step, without the technique in between; use another optimizer"
NO_WHOLE_WEIGHTS = {"zero3": ZERO3, "fsdp1": FSDP1, "lbfgs": LBFGS}
"""Conflicts of a technique that needs whole weights between two updates."""
OTHER_NAMES = (
    "TRL sends the engine weights by their names in the model, which differ in changed layers; leave out use_vllm"
)
"""Why techniques that replace layers exclude ``vllm_rollouts``."""
AVERAGED_COPY = (
    "before its layers are changed, and would average other tensors than the trained ones; use the technique average"
)
