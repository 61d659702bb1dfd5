"""A loop's ``model.eval()`` with an average whose norms are estimated anew: batches are looked at meanwhile."""

import atexit
import json

import pytest
import torch
from lightning.fabric import Fabric
from promise_drivers import prepared_loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff

AVERAGE = {"average": {"kind": "ema", "begin": 1, "bn_batches": 2}}
STEPS = 6


@pytest.fixture(params=["accelerate", "fabric"])
def loop(request, tmp_path, monkeypatch):
    """Return the plain model, what the script trains and how it steps."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=8)
    driver, model, own, loader = prepared_loop(request.param, AVERAGE, tmp_path, (plain, optimizer, loader), STEPS)
    yield plain, model, driver.backward, own.step, loader
    if request.param == "accelerate":
        driver.end_training()


def test_norms_of_an_average_are_estimated_and_training_goes_on_with_its_own(loop):
    plain, model, backward, step, loader = loop
    model.train()
    for number, (examples,) in enumerate(loader, start=1):
        backward(model(examples).square().mean())
        step()
        plain.zero_grad()
        if number == 3:
            trained = {name: value.clone() for name, value in plain.state_dict().items()}
            model.eval()
            averaged = {name: value.clone() for name, value in plain.state_dict().items()}
            assert not any(module.training for module in plain.modules())
            assert any(not torch.equal(averaged[name], trained[name]) for name in ("0.weight", "1.running_mean"))
            model.train()
            assert all(module.training for module in plain.modules())
            assert all(torch.equal(value, trained[name]) for name, value in plain.state_dict().items())


def test_a_script_that_never_trains_leaves_a_receipt_that_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    plain = nn.Linear(4, 2)
    lightning_eff.setup(
        Fabric(accelerator="cpu", devices=1), plain, torch.optim.SGD(plain.parameters(), lr=0.1),
        recipe={"prune": {"sparsity": 0.5}}, total_steps=STEPS,
    )  # fmt: skip
    at_exit[-1]()
    receipt = json.loads((tmp_path / "eff_receipt.json").read_text())
    assert receipt["steps"]["applied"] == 0
    assert "before its first step" in " ".join(receipt["notes"])
