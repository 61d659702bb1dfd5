"""One of two processes that train with our own strategies: ``lightning_strategies.py RANK FOLDER``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_blocks import AVERAGE, LOW_RANK, PRUNE, batches, module_class, train, weights
from lightning_world import BOTH
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from two_ranks import leave

from lightning_eff import EffDDPStrategy, EffFSDPStrategy
from lightning_eff.strategies import fsdp_class
from shared_core.errors import CompatibilityError, ConfigError, MatchError

# of a rank's process; a test collector that imports this file has none
RANK, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (0, Path())


class ShardsItself(module_class(BOTH[0])):
    def configure_model(self):
        fully_shard(self.blocks[0], mesh=self.device_mesh["data_parallel"])


class ByHand(module_class(BOTH[0])):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def sharded(tensors, told):
    recipe = {**PRUNE, **AVERAGE, "matmul": {"precision": "high"}}
    trainer, _, module = train(FOLDER / "fsdp", recipe, strategy="eff_fsdp", validate=True)
    told["fsdp"] = {
        "units": [name for name, part in module.named_modules() if isinstance(part, FSDPModule)],
        "held": sum(parameter.to_local().numel() for parameter in module.parameters()),
        "weights": sum(parameter.numel() for parameter in module.parameters()),
        "in_step": module.sharded,
        "validated": len(module.validated),
    }
    tensors["fsdp"] = weights(module)
    tensors["predicted"] = torch.cat(trainer.predict(module, batches()))
    tensors["fsdp resumed"] = weights(
        train(FOLDER / "again", recipe, strategy="eff_fsdp", ckpt_path=FOLDER / "fsdp" / "2.ckpt")[2]
    )
    ckpt = FOLDER / "factors" / "2.ckpt"
    for name, folder, resume in (("factors", "factors", None), ("factors resumed", "again", ckpt)):
        module = train(FOLDER / folder, LOW_RANK, strategy="eff_fsdp", ckpt_path=resume)[2]
        tensors[name] = weights(module)
    options = {"forward_prefetch": 2, "backward_prefetch": 1, "param_dtype": "bfloat16", "reduce_dtype": "float32"}
    for namespace, blocks in zip(BOTH, (["Block"], ["*.up", "blocks.0"]), strict=True):
        strategy = fsdp_class(namespace)
        module = train(
            FOLDER / "mixed", None, namespace=namespace, strategy=strategy(blocks=blocks, **options), save=False
        )[2]
        groups = [part for part in module.modules() if isinstance(part, FSDPModule)]
        told[namespace] = {
            "units": [name for name, part in module.named_modules() if isinstance(part, FSDPModule)],
            "ahead": [len(part._get_fsdp_state()._states_to_forward_prefetch) for part in groups],
            "behind": [len(part._get_fsdp_state()._states_to_backward_prefetch) for part in groups],
            "dtype": str(groups[1]._get_fsdp_state()._mp_policy.param_dtype),
            "sharded": all(isinstance(parameter, DTensor) for parameter in module.parameters()),
        }
        tensors[f"mixed {namespace}"] = weights(module)


def replicated(tensors, told):
    powersgd = {"comm": {"hook": "powersgd", "begin": 1}}
    tensors["ddp"] = weights(train(FOLDER / "ddp", {**PRUNE, **AVERAGE}, strategy="eff_ddp")[2])
    for name, strategy, recipe in (
        ("bf16", "eff_ddp_bf16", None),
        ("stock", "ddp", {"comm": {"hook": "bf16"}}),
        ("powersgd", EffDDPStrategy(**powersgd), {}),
    ):
        trainer, _, module = train(FOLDER / name, recipe, strategy=strategy, save=recipe is not None)
        tensors[name] = weights(module)
        told[name] = trainer.callbacks[0].receipt["techniques"]["comm"]
    ckpt = FOLDER / "powersgd" / "2.ckpt"
    tensors["powersgd resumed"] = weights(train(FOLDER / "again", powersgd, strategy="ddp", ckpt_path=ckpt)[2])
    called = []

    def counted(state, bucket):
        called.append(1)
        return default_hooks.allreduce_hook(None, bucket)

    train(FOLDER / "own", None, strategy=EffDDPStrategy(ddp_comm_hook=counted), save=False)
    told["called"] = len(called)
    # what one process saved goes on in two
    ckpt = FOLDER / "one" / "2.ckpt"
    _, callback, module = train(FOLDER / "grown", {**PRUNE, **AVERAGE}, strategy="ddp", ckpt_path=ckpt)
    tensors["grown"], told["grown"] = weights(module), callback.session.step


def refused(told):
    told["refused"] = []
    own = EffDDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)
    for module, strategy, recipe in (
        (ShardsItself(), "eff_fsdp", None),
        (ByHand(), "eff_fsdp", None),
        (None, EffFSDPStrategy(blocks=["Blok"]), None),
        (None, "eff_fsdp", {"comm": {"hook": "powersgd"}}),
        (None, "eff_fsdp", {"low_rank": {"rank": 8, "merge": True}}),
        (None, own, {"comm": {"hook": "bf16"}}),
        (None, "eff_ddp_bf16", {"comm": {"hook": "fp16"}}),
    ):
        try:
            train(FOLDER / "refused", recipe, module=module, strategy=strategy, save=False)
        except (CompatibilityError, ConfigError, MatchError) as error:
            told["refused"].append(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=2)
    tensors, told = {}, {}
    sharded(tensors, told)
    replicated(tensors, told)
    refused(told)
    torch.save({"tensors": tensors, "told": told}, FOLDER / f"{RANK}.pt")
    leave()
