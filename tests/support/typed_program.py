"""A user's program, for `mypy --strict` alone: what is imported lazily has its own type there, none is Any."""

from typing import Any, assert_type

import lightning.pytorch as unified
import pytorch_lightning as pl
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import efftrain
import efftrain.lightning
import hf_eff
import lightning_eff.lightning
import lightning_eff.pytorch
from hf_eff import EffTrainer, EffTrainingArguments, Pruning
from lightning_eff import EffDDPStrategy, EffFSDPStrategy, Fp8Precision, LossScalingPrecision
from shared_core import EffError, Recipe, Session
from shared_core.config.options import TechniqueConfig
from shared_core.engine.receipt import Receipt
from shared_core.pruning import PruneConfig
from shared_core.quantization import convert
from shared_core.tools.shrink import shrink


def program(model: nn.Module, inputs: Any) -> None:
    recipe = Recipe.from_dict({"prune": {"sparsity": 0.8}})
    assert_type(recipe["prune"], TechniqueConfig)
    assert_type(efftrain.Recipe.from_dict({}), Recipe)
    assert_type(efftrain.hf.Pruning(sparsity=0.5), Pruning)
    assert_type(efftrain.lightning.EffDDPStrategy(), EffDDPStrategy)
    assert_type(PruneConfig(sparsity=0.8).sparsity, float)
    assert_type(Session(recipe).receipt(), Receipt)
    assert_type(convert(model), nn.Module)
    assert_type(shrink(model, inputs).model, nn.Module)
    assert_type(str(EffError("told")), str)


def hugging_face(model: nn.Module) -> None:
    arguments = EffTrainingArguments(output_dir="out", prune_sparsity=0.8)
    assert_type(arguments.recipe, Recipe)
    assert_type(EffTrainer(model, arguments).args, TrainingArguments)
    assert_type(hf_eff.attach(Trainer(model, callbacks=[Pruning(sparsity=0.8)])), Session)
    callbacks: list[TrainerCallback] = [hf_eff.EffCallback("recipe.yaml"), hf_eff.LotteryTicket(out="out")]
    assert_type(callbacks, list[TrainerCallback])


def lightning() -> None:
    pruning = lightning_eff.Pruning(sparsity=0.8)
    assert_type(pruning.receipt, Receipt | None)
    fp8, scaled = Fp8Precision(recipe="delayed"), LossScalingPrecision("32-true")
    ddp, fsdp = EffDDPStrategy({"hook": "fp16"}), EffFSDPStrategy(blocks=["layers.*"])
    pl.Trainer(callbacks=[pruning], plugins=fp8, strategy=ddp)
    unified.Trainer(callbacks=[pruning], plugins=scaled, strategy=fsdp)
    assert_type(lightning_eff.pytorch.LossScalingPrecision(), LossScalingPrecision)
    assert_type(lightning_eff.lightning.EffFSDPStrategy(), EffFSDPStrategy)
