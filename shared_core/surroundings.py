"""What a front end reports of a run, as far as it decides a refusal."""

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
