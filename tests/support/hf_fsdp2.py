"""One of two processes that train a sharded model: ``hf_fsdp2.py FOLDER``, started by torch.distributed.run."""

import json
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.utils.data import SequentialSampler
from transformers import Trainer

from hf_eff import attach
from shared_core.ranks import rank, world_size

sys.path.insert(0, str(Path(__file__).parents[1] / "hf_eff"))
from conftest import make_arguments, make_language_model, make_texts

STEPS, BATCH = 6, 4
POISONED = 2


class InOrder(Trainer):
    poisoned = None

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        # of one rank alone: all must leave the step out
        return loss * torch.inf if self.poisoned == self.state.global_step and rank() == world_size() - 1 else loss


class CpuFsdp2(InOrder):
    """Really shards on a CPU, where the trainer takes the flags and then runs plain DDP."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
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


def train(folder, recipe, *, resume=None, same=False, trainer_class=CpuFsdp2, poisoned=None, model=None, **settings):
    """Return the trainer after training, its session, and the whole weights."""
    texts = make_texts(STEPS * BATCH * (1 if same else 2))
    if same and world_size() > 1:  # every batch once for each process
        batches = [texts[index : index + BATCH] for index in range(0, len(texts), BATCH)]
        texts = [text for batch in batches for _ in range(world_size()) for text in batch]
    size = BATCH if same or world_size() > 1 else 2 * BATCH
    trainer = trainer_class(
        model=model or make_language_model(),
        args=make_arguments(folder, **{
            "max_steps": STEPS, "per_device_train_batch_size": size, "save_strategy": "steps", "save_steps": 3, **settings,
        }),
        train_dataset=texts,
        eval_dataset=texts[:4],
    )
    trainer.poisoned = poisoned
    session = attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, session, whole(trainer.model)


def whole(model):
    state = model.state_dict()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
    }
