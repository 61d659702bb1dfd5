"""Adapters in Lightning, alone and over a base that qat quantizes: exact resume, plain checkpoints, training on."""

import importlib

import pytest
import torch
from lightning_world import BOTH, difference, everything, fit, make_module, make_trainer, saver
from torch import nn

from lightning_eff.callbacks import Lora, QuantizationAwareTraining
from shared_core.lora.adapters import adapters

peft = pytest.importorskip("peft")
QAT = {"scheme": "int8", "begin": 1}


def by_peft(seed):
    module = make_module(seed=seed)
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(target_modules=["0"], r=2, lora_dropout=0.2))
    return module


def train(folder, lora, qat=None, ckpt_path=None, seed=0, callbacks=(), namespace=BOTH[0], **options):
    """Train with adapters of ours, or of peft where `lora` is None."""
    ours = [Lora(**{"rank": 2, "base": "nf4", "save": "merged", **lora})] if lora is not None else []
    ours += [QuantizationAwareTraining(**qat)] if qat is not None else []
    trainer = make_trainer(folder, namespace, callbacks=[*ours, *callbacks], gradient_clip_val=0.5, **options)
    module = by_peft(seed) if lora is None else make_module(namespace, seed=seed)
    fit(trainer, module, seed=5 + seed, ckpt_path=ckpt_path)
    return ours[0], module, everything(trainer, module)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("lora", "qat"),
    [
        ({"dropout": 0.2}, None),
        ({"base": "int8", "requantize": True}, None),
        ({"base": "none"}, None),
        ({"base": "none", "dropout": 0.2}, QAT),
        ({"base": "none", "dropout": 0.2}, {**QAT, "range": "lsq_plus"}),
        (None, QAT),
        (None, {**QAT, "range": "lsq_plus"}),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(lora, qat, accumulate, tmp_path):
    options = {"lora": lora, "qat": qat, "accumulate_grad_batches": accumulate}
    _, _, whole = train(tmp_path, callbacks=[saver(BOTH[0], tmp_path)], **options)
    for point in (0, 6, 11):
        _, _, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) == [], point


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("namespace", BOTH)
def test_checkpoints_are_plain_and_only_adapters_and_head_move(namespace, precision, tmp_path):
    before = make_module(namespace).state_dict()
    last = saver(namespace, tmp_path, "on_train_end")
    callback, module, _ = train(tmp_path, {"dropout": 0.2}, namespace=namespace, precision=precision, callbacks=[last])
    saved = torch.load(tmp_path / "0.ckpt", weights_only=True)["state_dict"]
    make_module(namespace).to(saved["net.0.weight"].dtype).load_state_dict(saved, strict=True)
    assert type(module.net[0]) is nn.Linear
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    assert torch.equal(saved["net.0.bias"], before["net.0.bias"].to(saved["net.0.bias"].dtype))
    assert not torch.equal(saved["net.4.weight"], before["net.4.weight"].to(saved["net.4.weight"].dtype))
    told = callback.session.receipt()["techniques"]["lora"]
    assert (told["layers"], told["trained_whole"]) == (1, ["net.4"])
    assert told["per_layer"][0]["adapter_size"] > 0


@pytest.mark.parametrize("namespace", BOTH)
def test_what_is_left_is_the_users_module_on_qats_grid(namespace, tmp_path):
    last = saver(namespace, tmp_path, "on_train_end")
    callback, module, _ = train(tmp_path, {"base": "none"}, QAT, namespace=namespace, callbacks=[last])
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


@pytest.mark.parametrize("over", [[], [QuantizationAwareTraining(scheme="int8")]], ids=["alone", "qat"])
def test_training_on_goes_on_from_the_frozen_weight_and_the_adapters(over, tmp_path):
    callbacks = [Lora(rank=2, save="merged"), *over]
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


@pytest.mark.parametrize("namespace", BOTH)
def test_adapters_lie_beside_the_receipt_and_load_in_peft(namespace, tmp_path):
    trainer = make_trainer(tmp_path, namespace, callbacks=[Lora(rank=2), saver(namespace, tmp_path, "on_train_end")])
    module = make_module(namespace)
    fit(trainer, module, seed=5)
    (file,) = tmp_path.glob("**/adapters/adapter_model.safetensors")
    assert (file.parents[1] / "eff_receipt.json").is_file()
    stock = peft.PeftModel.from_pretrained(make_module(namespace), file.parent).base_model.model.net
    x = torch.randn(5, module.net[0].in_features, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(stock.eval()(x), module.net.eval()(x), atol=1e-6, rtol=1e-5)
    whole = torch.load(tmp_path / "0.ckpt", weights_only=True)["state_dict"]
    make_module(namespace).load_state_dict(whole, strict=True)
