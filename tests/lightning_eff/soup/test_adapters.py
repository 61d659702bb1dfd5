"""A soup of PEFT adapters in a LightningModule, whose checkpoints hold A, B and the base together."""

import copy

import pytest
import torch
from lightning_world import BOTH, fit, loader, make_module, make_trainer
from peft import LoraConfig, get_peft_model

from lightning_eff import EffCallback
from shared_core.errors import CompatibilityError


def module_with_adapters():
    module = make_module(BOTH[0])
    module.head = torch.nn.Linear(4, 4)  # outside, and trained as a whole
    module.net = get_peft_model(module.net, LoraConfig(r=2, lora_alpha=4, target_modules=["0", "4"]))
    module.forward = lambda x: module.head(module.net(x))
    return module


def run(folder, module, **options):
    from pytorch_lightning.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, monitor="val_loss")
    callback = EffCallback({"soup": options})
    trainer = make_trainer(folder, BOTH[0], callbacks=[callback, saving], enable_checkpointing=True, max_epochs=3)
    fit(trainer, module, val=True)
    return callback.receipt["techniques"]["soup"]


@pytest.mark.parametrize("rank", [None, 2])
def test_what_adapters_add_is_averaged_and_the_rest_as_in_a_model(tmp_path, rank):
    module = module_with_adapters()
    told = run(tmp_path, module, kind="uniform", rank=rank)
    assert told["adapter"]["r"] == (rank or 6)
    ends = [torch.load(path, weights_only=True)["state_dict"] for path in tmp_path.glob("*.ckpt")]
    got = module.state_dict()
    for name in ("head.weight", "net.base_model.model.1.running_mean"):
        torch.testing.assert_close(got[name], torch.stack([end[name] for end in ends]).mean(0))
    a, b = (f"net.base_model.model.0.lora_{side}.default.weight" for side in "AB")
    expected = sum(2 * end[b] @ end[a] for end in ends) / len(ends)
    layer = module.net.base_model.model[0]
    error = (layer.scaling["default"] * got[b] @ got[a] - expected).norm() / expected.norm()
    if rank is None:
        assert error < 1e-6
    else:  # a module that is built again takes what `rank` left
        assert error == pytest.approx(told["rank_errors"]["0"], rel=1e-4)
        module_with_adapters().load_state_dict(got)
        assert layer.scaling["default"] == pytest.approx(2)


def test_the_greedy_soup_is_what_the_trainer_measures(tmp_path):
    module = module_with_adapters()
    told = run(tmp_path, module, kind="greedy", metric="val_loss")
    (measured,) = make_trainer(tmp_path, BOTH[0]).validate(copy.copy(module), loader(shuffle=False), verbose=False)
    assert measured["val_loss"] == pytest.approx(told["score"], rel=1e-5)


def test_two_adapted_models_are_refused_at_the_start(tmp_path):
    module = module_with_adapters()
    module.other = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(CompatibilityError, match="must hold one PeftModel, got 'net', 'other'"):
        run(tmp_path, module, kind="uniform")
    assert not list(tmp_path.glob("*.ckpt"))
