"""One of two processes that train a sharded model: ``hf_fsdp2.py FOLDER``, started by torch.distributed.run.

Started by itself with ``FOLDER alone`` it trains the same in one process that is not sharded, for comparison.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from fsdp2_runs import AVERAGE, DP, FP8, PRUNE, SCALE, left, run_one_or_two, ticket
from torch.distributed.tensor import DTensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer

from hf_eff import attach
from shared_core.distributed.collectives import local_part, rank
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.fp8 import Fp8Linear

sys.path.insert(0, str(Path(__file__).parents[2] / "hf_eff"))
from conftest import make_arguments, make_language_model, make_texts

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))  # torch's own count comes with the first trainer
STEPS, BATCH, POISONED = 6, 4, 2
ACTIVATIONS = {"activations": {"pack": "exact", "min_size": 8}}
QAT = {
    "FULL_STATE_DICT": {"qat": {"scheme": "int8", "range": "lsq", "begin": 2}},
    "SHARDED_STATE_DICT": {"qat": {"scheme": "int8", "begin": 2}, "low_rank": {"rank": 4, "min_size": 0}},
}
STEADY = {"optim": "sgd", "learning_rate": 0.5}  # Adam makes a step of its own of a gradient's last bit
ALL = {**FP8["delayed"], **SCALE, **PRUNE, **AVERAGE, **ACTIVATIONS, "matmul": {"precision": "high"}}


SOUP = {**PRUNE, "soup": {"kind": "greedy"}}
PRIMARY = {"primary_weights": {"kind": "fp32_copy", "telemetry_every": 1}}
COMM = {"comm": {"hook": "bf16"}}
LORA = {"lora": {"base": "none", "rank": 4}, **AVERAGE}
ATTENTION = ["model.layers.?.self_attn=model.layers.?.self_attn"]


def distilled(**options):
    return {"distill": {"teacher": make_language_model(seed=9, hidden_size=32), "alpha": 0.3, **options}}


class InOrder(Trainer):
    """Takes the data in order, and notes what this process alone could know of an overflow."""

    poisoned = None

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.poisoned == "loss" and self.state.global_step == POISONED and rank() == 1:
            return loss * torch.inf
        return loss

    def _clip_grad_norm(self, model):
        self.finite = all(bool(local_part(p.grad).isfinite().all()) for p in model.parameters() if p.grad is not None)
        if self.state.global_step == POISONED:
            self.finite_when_poisoned = self.finite
        return super()._clip_grad_norm(model)


class CpuFsdp2(InOrder):
    """Really shards on a CPU, where the trainer takes the flags and then runs plain DDP."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        # both, or it reverts
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


def fsdp_flags(kind="FULL_STATE_DICT"):
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": kind,
            "cpu_ram_efficient_loading": False,
        },
    }


def one_overflow(trainer):
    """Have process 1 alone meet an infinity, in the gradient of a weight whose part process 0 keeps."""

    def forward_hook(head, args, logits):
        if trainer.state.global_step != POISONED or rank() != 1 or not torch.is_grad_enabled():
            return logits
        element = head.weight[0, 0].clone()
        element.register_hook(lambda grad: torch.full_like(grad, torch.inf))
        return logits + (element - element.detach())

    trainer.model.lm_head.register_forward_hook(forward_hook)


def train(
    folder, recipe, *, same=False, resume=None, trainer_class=None, poisoned=None, dtype=torch.float32, **settings
):
    """Return the trainer after training and its session.

    Args:
        folder: Where it saves.
        recipe: The recipe.
        same: Whether every process gets the same batches, or the parts of one batch.
        resume: Checkpoint to resume from.
        trainer_class: Of the trainer; by default one that really shards if there are several processes.
        poisoned: ``"loss"`` or ``"weight"``: what overflows on process 1.
        dtype: Of the weights.
        **settings: Training arguments.
    """
    size = BATCH if same else 2 * BATCH // PROCESSES
    texts = make_texts(STEPS * size * (1 if same else PROCESSES))
    if same:
        batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        texts = [text for batch in batches for _ in range(PROCESSES) for text in batch]
    settings = {"max_steps": STEPS, "per_device_train_batch_size": size, "save_steps": 3, **settings}
    if PROCESSES > 1:
        settings = {**fsdp_flags(), **settings}
    trainer = (trainer_class or (CpuFsdp2 if PROCESSES > 1 else InOrder))(
        model=make_language_model().to(dtype),
        args=make_arguments(folder, **{"save_strategy": "steps", **settings}),
        train_dataset=texts,
        eval_dataset=texts[:BATCH],
    )
    trainer.poisoned = poisoned
    if poisoned == "weight":
        one_overflow(trainer)
    session = attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, session


def found(trainer, session):
    return left(trainer.model, session)


def compared(folder):
    """Train what one process alone must train in the same way."""
    plain = {"save_strategy": "no"}
    shards = fsdp_flags("SHARDED_STATE_DICT") if PROCESSES > 1 else {}
    return {
        "soup": found(*train(folder / "soup", SOUP, save_steps=1, **shards)),
        "loss_scale": found(*train(folder / "loss_scale", {**SCALE, **ticket(folder, "first")}, **plain)),
        "ticket": found(*train(folder / "ticket", {**SCALE, **ticket(folder, "second", "first")}, **plain)),
        "all": found(*train(folder / "all", ALL, same=True, **plain)),
        "lora FULL_STATE_DICT": found(*train(folder / "lora FULL_STATE_DICT", LORA)),
        "dp": found(*train(folder / "dp", DP, gradient_accumulation_steps=2, **plain)),
        "distill": found(*train(folder / "distill", distilled(attention=ATTENTION), **plain)),
        **{
            f"steady qat {kind}": found(*train(folder / f"compared {kind}", QAT[kind], **plain, **STEADY))
            for kind in QAT
        },
        "tensorwise": found(*train(folder / "tensorwise", FP8["tensorwise"], same=True, **plain)),
    }


def sharded_only(folder):
    """Train what there is to see under FSDP2 alone; return tensors, and what was told."""
    tensors, told = {}, {}
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        for name, recipe, dtype in (
            (kind, ALL, torch.float32),
            (f"qat {kind}", QAT[kind], torch.float32),
            (f"primary {kind}", PRIMARY, torch.bfloat16),
            (f"lora {kind}", LORA, torch.float32),
            (f"dp {kind}", DP, torch.float32),
        ):
            saved, options = folder / name, {**fsdp_flags(kind), "dtype": dtype}
            if name != "lora FULL_STATE_DICT":  # trained by `compared`
                tensors[name] = found(*train(saved, recipe, **options))
            tensors[f"{name} resumed"] = found(*train(saved, recipe, resume=str(saved / "checkpoint-3"), **options))
    trainer, session = train(folder / "comm", COMM, save_strategy="no")
    tensors["comm"], told["comm"] = found(trainer, session), session.receipt()["techniques"]["comm"]
    trainer, session = train(folder / "typed", {**FP8["delayed"], **SCALE}, fp16=True)
    saved = folder / "typed" / "final"
    trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()
    loaded = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    weights = found(trainer, session)
    parameters = list(trainer.model.parameters())
    layers = session.receipt()["techniques"]["fp8"]["per_layer"]
    told["typed"] = {
        "is_fsdp2": trainer.accelerator.is_fsdp2,
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "held": sum(local_part(parameter).numel() for parameter in parameters),
        "weights": sum(parameter.numel() for parameter in parameters),
        "products": [layer["emulated"] for layer in layers],
        "stock": not any(isinstance(module, Fp8Linear) for module in trainer.model.modules()),
        "saved": all(torch.equal(weights[name], value) for name, value in loaded.items()),
        "notes": session.notes,
    }
    for name, recipe, poisoned in (("scaler", SCALE, "weight"), ("fp8", FP8["tensorwise"], "loss")):
        trainer, session = train(folder / name, recipe, same=True, poisoned=poisoned, save_strategy="no")
        tensors[name] = found(trainer, session)
        told[name] = {"skipped": session.skipped, "applied": session.step, "finite": trainer.finite_when_poisoned}
        told[name]["rate"] = trainer.lr_scheduler.last_epoch
    for name, validated in (("validated", {"eval_strategy": "steps", "eval_steps": 2}), ("unseen", {})):
        tensors[name] = found(*train(folder / name, {**AVERAGE, **PRUNE}, save_strategy="no", **validated))
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3}
    trainer, session = train(folder / "best", {**FP8["delayed"], **AVERAGE}, **best)
    tensors["best"] = found(trainer, session)
    told["best"] = Path(trainer.state.best_model_checkpoint).name
    recipe = distilled()
    trainer, session = train(folder / "teacher", {**recipe, **SCALE, **PRUNE}, fp16=True, save_strategy="no")
    teacher = recipe["distill"]["teacher"]
    told["teacher"] = {
        "held": sum(local_part(parameter).numel() for parameter in teacher.parameters()),
        "weights": sum(parameter.numel() for parameter in teacher.parameters()),
        "batches": session.receipt()["techniques"]["distill"]["batches"],
    }
    told["refused"] = []
    gathers = {"prune": {"sparsity": 0.5, "criterion": "fisher"}}
    flush = {"loss_scale": {"kind": "dynamic", "flush_every": 2}}
    in_16_bits = {"fp16": True, "max_steps": 1, "save_strategy": "no"}
    for recipe, options in (
        (gathers, {}),
        (flush, {}),
        ({"distill": {"teacher": "mutual"}}, {}),
        ({"comm": {"hook": "powersgd"}}, {}),
        (COMM, in_16_bits),
        (LORA, {"fsdp_config": {**fsdp_flags()["fsdp_config"], "cpu_ram_efficient_loading": True}}),
        (
            QAT["FULL_STATE_DICT"],
            {"fsdp_config": {**fsdp_flags()["fsdp_config"], "cpu_ram_efficient_loading": True}},
        ),
    ):
        try:
            train(folder / "refused", recipe, **options)
        except (CompatibilityError, TrainingError) as error:
            told["refused"].append(str(error))
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    try:
        train(folder / "lost", FP8["delayed"], trainer_class=InOrder, max_steps=1)
    except CompatibilityError as error:
        told["lost"] = str(error)
    os.environ.pop("ACCELERATE_USE_FSDP")  # the flags set it
    ddp = {"trainer_class": InOrder, "fsdp": False, "fsdp_config": None, "save_strategy": "no"}
    trainer, session = train(folder / "comm under DDP", COMM, **ddp)
    tensors["comm under DDP"], told["comm under DDP"] = found(trainer, session), session.receipt()["techniques"]["comm"]
    return tensors, told


if __name__ == "__main__":
    run_one_or_two(compared, sharded_only)
