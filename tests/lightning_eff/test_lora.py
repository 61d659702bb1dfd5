"""QLoRA in Lightning: exact resume, plain checkpoints, the command line."""

import importlib

import pytest
import torch
from lightning_world import BOTH, difference, everything, fit, make_module, make_trainer, saver
from torch import nn

from lightning_eff.callbacks import Lora
from shared_core.lora.adapters import adapters


def train(folder, ckpt_path=None, seed=0, callbacks=(), namespace=BOTH[0], more=None, **options):
    callback = Lora(rank=2, **({"dropout": 0.2} if more is None else more))
    trainer = make_trainer(folder, namespace, callbacks=[callback, *callbacks], gradient_clip_val=0.5, **options)
    module = make_module(namespace, seed=seed)
    fit(trainer, module, seed=5 + seed, ckpt_path=ckpt_path)
    return callback, module, everything(trainer, module)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("more", [{"dropout": 0.2}, {"base": "int8", "requantize": True}, {"base": "none"}])
def test_a_resumed_run_is_the_run_that_was_never_stopped(more, accumulate, tmp_path):
    options = {"accumulate_grad_batches": accumulate, "more": more}
    _, _, whole = train(tmp_path, callbacks=[saver(BOTH[0], tmp_path)], **options)
    for point in (0, 6, 11):
        _, _, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) == [], point


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("namespace", BOTH)
def test_checkpoints_are_plain_and_only_adapters_and_head_move(namespace, precision, tmp_path):
    before = make_module(namespace).state_dict()
    callback, module, _ = train(
        tmp_path, namespace=namespace, precision=precision, callbacks=[saver(namespace, tmp_path, "on_train_end")]
    )
    saved = torch.load(tmp_path / "0.ckpt", weights_only=True)["state_dict"]
    make_module(namespace).to(saved["net.0.weight"].dtype).load_state_dict(saved, strict=True)
    assert type(module.net[0]) is nn.Linear
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    assert torch.equal(saved["net.0.bias"], before["net.0.bias"].to(saved["net.0.bias"].dtype))
    assert not torch.equal(saved["net.4.weight"], before["net.4.weight"].to(saved["net.4.weight"].dtype))
    told = callback.session.receipt()["techniques"]["lora"]
    assert (told["layers"], told["trained_whole"]) == (1, ["net.4"])
    assert told["per_layer"][0]["adapter_size"] > 0


def test_training_on_goes_on_from_the_adapters(tmp_path):
    callback = Lora(rank=2)
    trainer = make_trainer(tmp_path, callbacks=[callback], max_epochs=1)
    module = make_module()
    fit(trainer, module)
    saved = callback.session.state_dict()["techniques"]["lora"]["layers"]["net.0"]
    seen = []

    class Look(importlib.import_module(BOTH[0]).Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            seen.append([matrix.detach().clone() for matrix in adapters(pl_module.net[0])])

    trainer.callbacks.append(Look())
    trainer.fit_loop.max_epochs = 2
    fit(trainer, module)
    assert all(map(torch.equal, seen[0], saved["adapters"]))


def test_command_line():
    cli = importlib.import_module(f"{BOTH[0]}.cli")
    boring = importlib.import_module(f"{BOTH[0]}.demos.boring_classes")
    arguments = ["--trainer.callbacks+=lightning_eff.callbacks.Lora", "--trainer.callbacks.rank=8"]
    arguments += ["--trainer.callbacks.base=fp4"]
    made = cli.LightningCLI(boring.BoringModel, boring.BoringDataModule, args=arguments, run=False)
    (callback,) = (callback for callback in made.trainer.callbacks if isinstance(callback, Lora))
    assert (callback.recipe["lora"].rank, callback.recipe["lora"].base) == (8, "fp4")
