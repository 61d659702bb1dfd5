"""Run environments, and the reasons against them that several techniques give."""

from __future__ import annotations

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
    "manual_optimization": "Lightning's manual optimisation",
    "several_optimizers": "more than one optimizer",
    "data_parallel": "torch.nn.DataParallel",
    "unequal_ranks": "average_tokens_across_devices=False with several processes",
    "tensor_parallel": "tensor parallelism, or a model that was sharded while it was loaded",
    "sharded_by_user": "a model that was sharded before the trainer got it",
    "peft": "a model of PEFT",
    "tpu": "XLA",
    "averaging_callback": "another callback that averages weights",
    "pruning_callback": "Lightning's ModelPruning",
    "own_loop": "a loop of your own, of accelerate or Fabric",
    "trainer_checkpointing": "the trainer's own activation checkpointing",
}
"""Key of each run environment that a front end can report, and its name in messages."""

EVERY_TECHNIQUE = {
    "data_parallel": "DataParallel copies the modules for every forward and loses what they record; start one process "
    "per device with torchrun",
    "tensor_parallel": "layers hold only parts of a weight in the forward pass; use DDP or FSDP2",
    "sharded_by_user": "the trainer puts its parts into DDP, which takes whole weights; have the trainer shard it, or "
    "train in a loop of your own",
    "tpu": "it has not been run on XLA devices",
    "deepspeed_fp16": "its gradients are multiples of themselves until the engine steps, by a scale of its own; train "
    "in bf16",
    "lightning_deepspeed": "it needs CUDA devices and has not been run there; use DDP or FSDP2",
    "pruning_callback": "it replaces the weights by masks and weights of its own; the technique prune does what it "
    "does",
}
"""Environments that refuse a technique which does not name them in `works_in`, and why."""

DEEPSPEED = "DeepSpeed splits the optimizer and scales the loss itself; use DDP"
ZERO3 = "no process holds whole weights between forward passes; use stage 2 or FSDP2"
FSDP1 = "FSDP1 flattens the weights, so rows, channels and names are lost; use DDP or FSDP2"
EFFICIENT_LOADING = (
    "accelerate would fill the sharded model from its state dict, which holds {}; set cpu_ram_efficient_loading false "
    "in fsdp_config"
)
LBFGS = "LBFGS moves the weights many times in one step, and nothing holds in between; use another optimizer"
NO_WHOLE_WEIGHTS = {"zero3": ZERO3, "fsdp1": FSDP1, "lbfgs": LBFGS}
"""Conflicts of a technique that must see whole weights between two updates of them."""
AVERAGED_COPY = (
    "before its layers are changed, and would average other tensors than are trained; the technique average does both"
)
