"""Adapters over a base that qat quantises, in Lightning: exact resume, training on, and a model that peft wrapped."""

import importlib

import pytest
import torch
from lightning_world import BOTH, difference, everything, fit, make_module, make_trainer, saver
from torch import nn

from lightning_eff.callbacks import Lora, QuantizationAwareTraining
from shared_core.lora.adapters import adapters

peft = pytest.importorskip("peft")


def wrapped(seed):
    module = make_module(seed=seed)
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(target_modules=["0"], r=2, lora_dropout=0.2))
    return module


def train(folder, ckpt_path=None, seed=0, by_peft=False, callbacks=(), namespace=BOTH[0], qat=None, **options):
    ours = [QuantizationAwareTraining(scheme="int8", begin=1, **(qat or {}))]
    ours += [] if by_peft else [Lora(rank=2, base="none", dropout=0.2)]
    trainer = make_trainer(folder, namespace, callbacks=[*ours, *callbacks], **options)
    module = wrapped(seed) if by_peft else make_module(namespace, seed=seed)
    fit(trainer, module, seed=5 + seed, ckpt_path=ckpt_path)
    return ours[0], module, everything(trainer, module)


@pytest.mark.parametrize("by_peft", [False, True])
@pytest.mark.parametrize("qat", [{}, {"range": "lsq_plus"}])
def test_a_resumed_run_is_the_run_that_was_never_stopped(by_peft, qat, tmp_path):
    options = {"by_peft": by_peft, "qat": qat}
    _, _, whole = train(tmp_path, callbacks=[saver(BOTH[0], tmp_path)], **options)
    for point in (0, 11):
        _, _, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) == [], point


@pytest.mark.parametrize("namespace", BOTH)
def test_what_is_left_is_the_users_module_on_qats_grid(namespace, tmp_path):
    callback, module, _ = train(tmp_path, namespace=namespace, callbacks=[saver(namespace, tmp_path, "on_train_end")])
    saved = torch.load(tmp_path / "0.ckpt", weights_only=True)["state_dict"]
    make_module(namespace).load_state_dict(saved, strict=True)
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    assert type(module.net[0]) is nn.Linear
    codes = module.net[0].weight / (module.net[0].weight.abs().amax(1, keepdim=True) / 127)
    torch.testing.assert_close(codes, codes.round(), atol=1e-3, rtol=0)
    told = callback.session.receipt()["techniques"]
    assert set(told) == {"lora", "qat"}
    assert {entry["name"] for entry in told["qat"]["per_layer"]} == {"net.0", "net.4"}
    assert told["lora"]["per_layer"][0]["requantized_error"] > 0


def test_training_on_goes_on_from_the_frozen_weight_and_the_adapters(tmp_path):
    callbacks = [Lora(rank=2, base="none"), QuantizationAwareTraining(scheme="int8")]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=1)
    module = make_module()
    frozen = module.net[0].weight.detach().clone()
    fit(trainer, module)
    saved = callbacks[0].session.state_dict()["techniques"]["lora"]["layers"]["net.0"]
    seen = []

    class Look(importlib.import_module(BOTH[0]).Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            layer = pl_module.net[0]
            seen.append([tensor.detach().clone() for tensor in (layer.base_layer.weight, *adapters(layer))])

    trainer.callbacks.append(Look())
    trainer.fit_loop.max_epochs = 2
    fit(trainer, module)
    assert torch.equal(seen[0][0], frozen)
    assert all(map(torch.equal, seen[0][1:], saved["adapters"]))
