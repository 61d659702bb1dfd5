"""What must be known of a trainer before anything is attached: its precision, its processes, its output folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils.import_utils import is_peft_available, is_torch_xla_available

from hf_eff._adapters.privacy import check_trainer
from shared_core.engine.model_guards import wrapped_by_user
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError

if TYPE_CHECKING:
    from transformers import Trainer

    from shared_core.engine.recipe import Recipe

_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT")
_TOKEN_TASKS = ("CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS")


def forget_optimizer(trainer: Trainer) -> None:
    """Have the trainer make its optimizer anew where the model has other parameters than when it made one."""
    if trainer.optimizer is None:
        return
    held = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    if any(weight.requires_grad and id(weight) not in held for weight in cast(Any, trainer.model).parameters()):
        trainer.optimizer = None


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return cast(torch.optim.Optimizer, optimizer)


def is_peft(model: Any) -> bool:
    """Return whether this is a model with adapters, whose checkpoints hold only these."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def surroundings(trainer: Trainer) -> set[str]:
    """Return the keys of `shared_core.config.conflicts.RUN_ENVIRONMENTS` that hold for this trainer."""
    args, accelerator = trainer.args, trainer.accelerator
    optimizer_class = (trainer.optimizer_cls_and_kwargs or (None,))[0]
    if trainer.optimizer is not None:
        optimizer_class = type(inner_optimizer(trainer.optimizer))
    holds = {
        "bf16": accelerator.mixed_precision == "bf16",
        "fp16": accelerator.mixed_precision == "fp16",
        "deepspeed": trainer.is_deepspeed_enabled,
        "zero3": trainer.is_deepspeed_enabled and is_deepspeed_zero3_enabled(),  # type: ignore[no-untyped-call]
        "data_parallel": args.n_gpu > 1,
        "unequal_ranks": args.world_size > 1 and not args.average_tokens_across_devices,
        "lbfgs": isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS),
        "trainer_checkpointing": bool(args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)),
        "peft": is_peft(trainer.model) or bool(getattr(trainer.model, "_hf_peft_config_loaded", False)),
        "tpu": is_torch_xla_available(),
        "tensor_parallel": bool(getattr(trainer.model, "is_distributed_loading_by_transformers", False)),
    }
    if trainer.is_fsdp_enabled:
        version = getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1)
        holds["fsdp2" if version == 2 else "fsdp1"] = True
    found = {key for key, value in holds.items() if value}
    model = trainer.model
    return found if model is None or trainer.is_fsdp_enabled else found | wrapped_by_user(model)


def check_sharding(trainer: Trainer, recipe: Recipe) -> None:
    """Refuse a run that asked for FSDP or DeepSpeed where accelerate, which says nothing, would train in plain DDP.

    Raises:
        CompatibilityError: If it would, or if it would shard a model by a state dict that lacks what is trained.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    beside = {"lora": "merged weights and no adapters"} if "lora" in recipe else {}
    if "qat" in recipe and recipe["qat"].to_dict()["range"] in ("lsq", "lsq_plus", "pact"):
        beside["qat with learned ranges"] = "weights and no ranges"
    for key, held in beside.items() if getattr(plugin, "cpu_ram_efficient_loading", False) else ():
        raise CompatibilityError(
            f"hf: {key} needs cpu_ram_efficient_loading false in fsdp_config: accelerate would fill the sharded model "
            f"from its state dict, which holds {held}"
        )
    if getattr(trainer.args, "deepspeed_plugin", None) is not None and not trainer.is_deepspeed_enabled:
        raise CompatibilityError(
            f"hf: DeepSpeed was asked for, but accelerate does not use it here (distributed type "
            f"{trainer.accelerator.distributed_type.value}): every process would hold the whole model, as in DDP; "
            "leave out use_cpu, or drop deepspeed and ACCELERATE_USE_DEEPSPEED"
        )
    asked = bool(trainer.args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and not trainer.is_fsdp_enabled and not trainer.is_fsdp_xla_enabled:
        raise CompatibilityError(
            f"hf: FSDP was asked for, but accelerate does not shard here (distributed type "
            f"{trainer.accelerator.distributed_type.value}): every process would hold the whole model, as in DDP; "
            "start several processes on devices that it shards on, or drop fsdp and ACCELERATE_USE_FSDP"
        )


def check_outputs(trainer: Trainer, recipe: Recipe) -> None:
    """Refuse at start what would fail at the end.

    Raises:
        CheckpointError: If the output folder cannot be written.
        ConfigError: If a soup would find no checkpoint or no evaluation.
    """
    args = trainer.args
    if args.should_save:
        try:
            os.makedirs(str(args.output_dir), exist_ok=True)
            with tempfile.TemporaryFile(dir=args.output_dir):
                pass
        except OSError as error:
            raise CheckpointError(
                f"hf: output_dir must be a writable folder, got {args.output_dir!r}: {error}"
            ) from error
    if recipe and getattr(getattr(trainer, "setfit_args", None), "end_to_end", False):
        raise CompatibilityError(
            "hf: SetFit's end_to_end must be False, got True: it trains the sentence model on after its trainer has "
            "ended, which undoes what the techniques did to the weights; train the head alone"
        )
    if "dp" in recipe:
        check_trainer(trainer)
    if "distill" in recipe:
        _check_distillation(trainer, chunked=recipe["distill"].to_dict()["chunked"])
    if "soup" not in recipe:
        return
    if args.save_strategy == SaveStrategy.NO:
        raise ConfigError(
            "soup: save_strategy must save checkpoints while training, got 'no'; set save_strategy to steps or epoch"
        )
    if args.save_total_limit == 1 and not args.load_best_model_at_end:  # which keeps the best one beside the last
        raise ConfigError(
            "soup: save_total_limit must keep at least two checkpoints, got 1, which leaves nothing to average; "
            "raise it or leave it out"
        )
    soup = recipe["soup"].to_dict()
    evaluated = trainer.eval_dataset
    if soup["kind"] == "greedy" and (evaluated is None or _is_empty(evaluated)):
        got = "None" if evaluated is None else "one without examples"
        raise ConfigError(
            f"soup: eval_dataset must hold examples for a greedy soup, got {got}; pass one to the trainer"
        )
    if soup["order"] == "logged" and args.eval_strategy == IntervalStrategy.NO:
        raise ConfigError(
            "soup: eval_strategy must evaluate while training for order logged, got 'no'; give it the value of "
            "save_strategy"
        )


def _is_empty(data: Any) -> bool:
    """Return whether a data set, or one of a dict of them, is known to have no example; a stream does not tell."""
    parts = data.values() if isinstance(data, dict) else [data]
    return any(isinstance(part, Sized) and len(part) == 0 for part in parts)


def _check_distillation(trainer: Trainer, *, chunked: bool) -> None:
    if _hides_logits(trainer):
        way_out = "train with TRL's SFTTrainer or transformers' own Trainer"
        if _is_sft(trainer):
            way_out = (
                "train with transformers' own Trainer, or without chunked and with a label_smoothing_factor"
                if chunked
                else "give its arguments a label_smoothing_factor (1e-9 will do), for which it computes them"
            )
        raise CompatibilityError(
            f"distill: trainer must compute logits, but TRL's {type(trainer).__name__} fuses its loss into the head "
            f"and returns none; {way_out}"
        )
    prompts = getattr(trainer.model, "active_peft_config", None) if is_peft(trainer.model) else None
    if prompts is not None and prompts.peft_type in _PROMPTS and prompts.task_type in _TOKEN_TASKS:
        raise CompatibilityError(
            f"distill: logits must be those of the batch's tokens, but PEFT's {prompts.peft_type.value} puts "
            f"{prompts.num_virtual_tokens} of its own before them, which no teacher sees; take prefix tuning or LoRA"
        )
    if chunked and trainer.label_smoother is not None:
        raise CompatibilityError(
            f"distill: label_smoothing_factor must be 0 with chunked, got {trainer.args.label_smoothing_factor}: the "
            "trainer smooths the log-probabilities of all classes, which do not exist; drop one of the two"
        )
    if chunked and trainer.args.torch_compile:
        raise CompatibilityError(
            "distill: torch_compile must be False with chunked, got True: a compiled head computes logits; drop one of "
            "the two"
        )


def _hides_logits(trainer: Trainer) -> bool:
    # TRL replaces the forward of the model's instance by one that takes `fused_lm_head`
    model: Any = trainer.model.get_base_model() if is_peft(trainer.model) else trainer.model  # type: ignore[operator, union-attr]
    forward = getattr(model.forward, "__func__", model.forward)
    code = getattr(forward, "__code__", None)
    if code is None or "fused_lm_head" not in code.co_varnames:
        return False
    return not _is_sft(trainer) or (trainer.label_smoother is None and trainer.compute_loss_func is None)


def _is_sft(trainer: Trainer) -> bool:
    return any(cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__)
