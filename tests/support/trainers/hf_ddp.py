"""One of two processes that train with the Trainer under DDP: ``hf_ddp.py RANK FOLDER``."""

import os
import sys
from pathlib import Path

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from hf_gradients import InOrder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from two_ranks import be_a_rank

from hf_eff import EffTrainer, EffTrainingArguments, attach
from shared_core.errors import CompatibilityError

sys.path.insert(0, str(Path(__file__).parents[2] / "hf_eff"))
from conftest import make_arguments, make_language_model, make_texts

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
AVERAGED = {"average": {"kind": "ema", "decay": 0.7, "every": 2}, "prune": {"sparsity": 0.6, "begin": 1, "end": 5}}
PROJECTED = ["model.layers.*.mlp=model.layers.*.mlp"]
STEPS, BATCH = 6, 4


def with_features():
    """Return a recipe whose teacher has other widths: its projections are in no output of the student."""
    return {"distill": {"teacher": make_language_model(seed=9, hidden_size=32), "hidden": PROJECTED}}


class EffInOrder(InOrder, EffTrainer):
    pass


class ForeignHook(InOrder):
    def _build_accelerator_args(self, **kwargs):
        arguments = super()._build_accelerator_args(**kwargs)
        for handler in arguments["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.comm_hook = DDPCommunicationHookType.FP16
        return arguments


def train(folder, recipe=None, *, resume=None, model=None, trainer_class=InOrder, **settings):
    """Return the trainer after training and its session."""
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "optim": "sgd", **settings}
    settings["per_device_train_batch_size"] = BATCH // PROCESSES
    trainer = trainer_class(
        model=model or make_language_model(),
        args=make_arguments(folder, **settings),
        train_dataset=make_texts(STEPS * BATCH),
    )
    session = attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, session


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def refused(folder):
    mesh = init_device_mesh("cpu", (PROCESSES,))
    sharded = make_language_model()
    fully_shard(sharded, mesh=mesh)
    flat = FullyShardedDataParallel(make_language_model(), device_id=torch.device("cpu"))
    lines = []
    for model, recipe, options in (
        (None, {"comm": {"hook": "bf16"}}, {"trainer_class": ForeignHook}),
        (sharded, AVERAGED, {}),
        (flat, AVERAGED, {}),
        (nn.DataParallel(make_language_model()), AVERAGED, {}),
        (None, AVERAGED, {"fsdp": True, "fsdp_config": {"version": 2}}),
    ):
        try:
            train(folder / "refused", recipe, model=model, **options)
        except CompatibilityError as error:
            lines.append(str(error))
    return lines


def work(rank, folder):
    tensors, told = {"two": weights(train(folder / "two", AVERAGED)[0])}, {}
    tensors["grown"] = weights(train(folder / "grown", AVERAGED, resume=str(folder / "one" / "checkpoint-3"))[0])
    tensors["features"] = weights(train(folder / "features", with_features())[0])
    flags = {
        "arguments_class": EffTrainingArguments,
        "comm_hook": "powersgd",
        "comm_begin": "1",
        "optim": "adamw_torch",
    }
    for name, resume in (("powersgd", None), ("resumed", str(folder / "powersgd" / "checkpoint-3"))):
        settings = {"trainer_class": EffInOrder, "resume": resume, "gradient_accumulation_steps": 2, **flags}
        trainer, session = train(folder / name, **settings)
        tensors[name], told[name] = weights(trainer), session.receipt()["techniques"]["comm"]
    told["refused"] = refused(folder)
    return {"tensors": tensors, "told": told}


if __name__ == "__main__":
    be_a_rank(work)
