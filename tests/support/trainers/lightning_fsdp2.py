"""One of two processes that train a sharded module: ``lightning_fsdp2.py FOLDER``, by torch.distributed.run.

Started by itself it trains the same in one process that is not sharded, for comparison.
"""

import itertools
import json
import os
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from fsdp2_runs import ranges_and_steps
from lightning_world import BOTH, QUIET, saver
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import EffCallback
from lightning_eff.pytorch import EffFSDPStrategy
from shared_core.distributed.collectives import local_part, rank
from shared_core.errors import CompatibilityError
from shared_core.fp8 import Fp8Linear

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
STEPS, BATCH, POISONED = 6, 8, 2
SCALE = {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "telemetry_every": 1, "histogram_every": 2}}
FP8 = {recipe: {"fp8": {"recipe": recipe}} for recipe in ("tensorwise", "delayed")}
AVERAGE = {"average": {"kind": "ema", "decay": 0.7, "every": 2}}
PRUNE = {"prune": {"sparsity": 0.6, "begin": 0.2, "end": 0.8, "every": 2}}
QAT = {"qat": {"scheme": "int8", "range": "minmax", "begin": 1}}
LSQ = {"qat": {"scheme": "int8", "range": "lsq", "begin": 1}}
LORA = {"lora": {"base": "none", "rank": 3}, **AVERAGE}
DP = {"dp": {"noise_multiplier": 0.5, "seed": 1, "delta": 1e-3}}
SOUP = {"soup": {"kind": "greedy", "metric": "val_loss", "order": "newest"}}
ALL = {**FP8["delayed"], **SCALE, **PRUNE, **AVERAGE, "matmul": {"precision": "high"}}


def ticket(folder, out, found=None):
    """Return the recipe of a round, of the first or with what another found."""
    given = {} if found is None else {"ticket": str(folder / found / "ticket.safetensors")}
    return {"lottery": {"out": str(folder / out), "rewind_to": 2, "rate": 0.4, **given}}


def distilled():
    torch.manual_seed(9)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    return {"distill": {"teacher": teacher, "student": "net", "alpha": 0.3}}


class Sharded(pl.LightningModule):
    """Shards itself in ``configure_model``, as Lightning asks for.

    Args:
        late: Whether the layers are made there too.
        each: Whether every linear layer is sharded by itself, which changes its class.
        poisoned: ``"loss"`` or ``"weight"``: what overflows on process 1.
    """

    def __init__(self, late=False, each=False, poisoned=None):
        super().__init__()
        self.each, self.poisoned = each, poisoned
        self.rates, self.finite_when_poisoned = [], None
        if not late:
            self.make()

    def make(self):
        torch.manual_seed(0)
        sizes = (16, 32, 32, 32, 4)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.net = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])

    def configure_model(self):
        if not hasattr(self, "net"):
            self.make()
        if PROCESSES == 1:
            return
        mesh = self.device_mesh["data_parallel"]
        if self.each:
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        if self.poisoned == "weight":
            self.net[0].register_forward_hook(self.one_overflow)

    def one_overflow(self, layer, args, output):
        """Have process 1 alone meet an infinity, in the gradient of a weight whose part process 0 keeps."""
        if self.trainer.global_step != POISONED or rank() != 1:
            return output
        element = layer.weight[0, 0].clone()
        element.register_hook(lambda grad: torch.full_like(grad, torch.inf))
        return output + (element - element.detach())

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.poisoned == "loss" and index == POISONED and rank() == 1:
            return loss * torch.inf
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == POISONED:
            grads = [local_part(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
            self.finite_when_poisoned = all(bool(grad.isfinite().all()) for grad in grads)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Steady(Sharded):
    """Trained by SGD: Adam makes a step of its own of a gradient's last bit."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Plain(Sharded):
    """Left to `eff_fsdp` to shard."""

    def configure_model(self):
        pass


class Validated(Plain):
    """Saved after every step, and validated."""

    def configure_callbacks(self):
        return [
            pl.callbacks.ModelCheckpoint(
                Path(self.trainer.default_root_dir) / "own", save_top_k=-1, every_n_train_steps=1
            )
        ]

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self):
        return batches(same=False)


def batches(same):
    """Return a loader of this process's part of every batch, or of the whole of every batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, 16, generator=generator)
    y = (x[..., 0] > 0).long() + 2 * (x[..., 1] > 0).long()
    if not same:
        part = slice(rank_before() * BATCH // PROCESSES, (rank_before() + 1) * BATCH // PROCESSES)
        x, y = x[:, part], y[:, part]
    return DataLoader(TensorDataset(x.flatten(0, 1), y.flatten()), batch_size=x.shape[1])


def rank_before():
    return int(os.environ.get("RANK", "0"))  # there are no processes yet


def train(folder, recipe, *, same=False, ckpt_path=None, distributed=False, module=None, loader=None, **options):
    """Return the trainer after training, its callback, and the module; a checkpoint is saved after every batch."""
    callback, module = EffCallback(recipe), module or Sharded()
    strategy = ModelParallelStrategy(PROCESSES, 1, save_distributed_checkpoint=distributed) if PROCESSES > 1 else "auto"
    trainer = pl.Trainer(
        **{
            **QUIET, "default_root_dir": str(folder), "logger": False, "enable_checkpointing": True, "max_epochs": 1,
            "strategy": strategy, "devices": PROCESSES, "use_distributed_sampler": False,
            "callbacks": [callback, saver(BOTH[0], folder / "saved")], **options,
        }
    )  # fmt: skip
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader or batches(same), ckpt_path=ckpt_path)
    return trainer, callback, module


def private(folder, **options):
    """Return what `train` does of a private run, in which every process holds all data."""
    loader = DataLoader(batches(same=True).dataset, batch_size=BATCH // PROCESSES)
    sampled = {"loader": loader, "use_distributed_sampler": True, "accumulate_grad_batches": 2}
    return train(folder, DP, **{"module": Sharded(each=True), **sampled, **options})


def found(trainer, callback, module):
    """Return all that two equal runs have in common, as whole tensors."""
    values = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.state_dict().items()
    }
    bank = callback.session.state_dict()["techniques"].get("fp8", {}).get("bank", {})
    if "qat" in callback.session.techniques:
        values |= ranges_and_steps(callback.session.techniques["qat"], values)
    return {**values, **{f"fp8.{name}": torch.as_tensor(value) for name, value in bank.items()}}


def compared(folder):
    """Train what one process alone must train in the same way."""
    own = {"strategy": EffFSDPStrategy(save_distributed_checkpoint=True)} if PROCESSES > 1 else {}
    return {
        "loss_scale": found(*train(folder / "loss_scale", {**SCALE, **ticket(folder, "first")})),
        "ticket": found(*train(folder / "ticket", {**SCALE, **ticket(folder, "second", "first")})),
        "all": found(*train(folder / "all", ALL, same=True)),
        "tensorwise": found(*train(folder / "tensorwise", FP8["tensorwise"], same=True)),
        "distill": found(*train(folder / "distill", distilled())),
        "qat": found(*train(folder / "qat", QAT, module=Steady())),
        "dp": found(*private(folder / "dp")),
        "soup": found(*train(folder / "soup", SOUP, module=Validated(), **own)),
    }


def sharded_only(folder):
    """Train what there is to see under FSDP2 alone; return tensors, and what was told."""
    tensors, told = {}, {"layers": {}}
    for late in (False, True):
        for each in (False, True):
            name = f"late={late} each={each}"
            trainer, callback, module = train(folder / name, ALL, same=True, module=Sharded(late=late, each=each))
            tensors[name] = found(trainer, callback, module)
            told["layers"][name] = {
                "matched": [layer["name"] for layer in callback.receipt["techniques"]["fp8"]["per_layer"]],
                "products": [layer["emulated"] for layer in callback.receipt["techniques"]["fp8"]["per_layer"]],
                "sharded": all(isinstance(parameter, DTensor) for parameter in module.parameters()),
                "classes": [type(layer).__name__ for layer in module.net if isinstance(layer, nn.Linear)],
                "stock": not any(isinstance(layer, Fp8Linear) for layer in module.modules()),
            }
    for distributed in (False, True):
        # batch 4 of 6 lies inside a window, after the first step: each process's gradients are part of the state
        options = {"distributed": distributed, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
        for recipe, name in ((ALL, f"distributed={distributed}"), (QAT, f"qat distributed={distributed}")):
            saved = folder / name
            tensors[name] = found(*train(saved, recipe, **options))
            tensors[f"{name} resumed"] = found(*train(saved, recipe, ckpt_path=saved / "saved" / "4.ckpt", **options))
        for key, resumed in itertools.product(("lora", "lsq", "dp"), (False, True)):
            saved = folder / f"{key} distributed={distributed}"
            own = {"module": Plain(), "strategy": EffFSDPStrategy(save_distributed_checkpoint=distributed)}
            own["ckpt_path"] = saved / "saved" / "4.ckpt" if resumed else None
            made = private(saved, **own) if key == "dp" else train(saved, {"lora": LORA, "lsq": LSQ}[key], **own)
            tensors[saved.name + " resumed" * resumed] = found(*made)
    whole = torch.load(folder / "distributed=False" / "saved" / "5.ckpt", weights_only=True)["state_dict"]
    plain = Sharded()
    plain.load_state_dict(whole)
    tensors["whole"] = plain.state_dict()
    for hook in ("fp16", "bf16"):
        trainer, callback, module = train(folder / f"comm {hook}", {"comm": {"hook": hook}})
        tensors[f"comm {hook}"] = found(trainer, callback, module)
        told[f"comm {hook}"] = callback.receipt["techniques"]["comm"]
    fp16 = {"plugins": MixedPrecision("16-mixed", "cpu"), "gradient_clip_val": 0.5}
    for name, recipe, poisoned, options in (
        ("scaler", SCALE, "weight", {}),
        ("fp16", {**SCALE, **FP8["tensorwise"]}, "weight", fp16),
        ("fp8", FP8["tensorwise"], "loss", {}),
    ):
        made = train(folder / name, recipe, same=True, module=Sharded(poisoned=poisoned), **options)
        tensors[name], session = found(*made), made[1].session
        told[name] = {"skipped": session.skipped, "applied": session.step, "finite": made[2].finite_when_poisoned}
        told[name]["rate"] = made[0].lr_scheduler_configs[0].scheduler.last_epoch
    told["refused"] = []
    gathers = {"prune": {"sparsity": 0.5, "criterion": "fisher"}}
    for recipe in (gathers, {"loss_scale": {"kind": "dynamic", "flush_every": 2}}):
        try:
            train(folder / "refused", recipe)
        except CompatibilityError as error:
            told["refused"].append(str(error))
    try:
        train(folder / "refused", FP8["tensorwise"], strategy=ModelParallelStrategy(1, 2))
    except CompatibilityError as error:
        told["refused"].append(str(error))
    try:
        train(folder / "refused", LSQ, module=Plain().bfloat16(), strategy=EffFSDPStrategy())
    except CompatibilityError as error:
        told["refused"].append(str(error))
    return tensors, told


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if PROCESSES == 1:
        torch.save(compared(folder), folder / "alone.pt")
    else:
        tensors = compared(folder)
        more, told = sharded_only(folder)
        torch.save({**tensors, **more}, folder / f"{rank()}.pt")
        (folder / f"{rank()}.json").write_text(json.dumps(told))
