"""DP-SGD in Lightning: the loss's check, limits, refusals."""

import collections
import dataclasses
import importlib
import types

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_eff import DifferentialPrivacy
from shared_core.errors import CompatibilityError, ConfigError


class Tokens(pl.LightningModule):
    """Rows of which different numbers of places count."""

    def __init__(self, by_row):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.by_row = nn.Linear(3, 1), by_row

    def training_step(self, batch, index):
        x, counted = batch
        errors = self.layer(x).squeeze(-1).square() * counted
        if self.by_row:
            return (errors.sum(1) / counted.sum(1)).mean()
        return errors.sum() / counted.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, folder, data=None, **options):
    torch.manual_seed(1)
    size = 1 + torch.arange(40)[:, None] // 8  # grows with the row: halves of any draw differ in tokens and errors
    x, counted = size[:, None] * torch.randn(40, 5, 3), (torch.arange(5) < size).float()
    data = data or DataLoader(TensorDataset(x, counted), batch_size=10, shuffle=True)
    private = DifferentialPrivacy(**{"noise_multiplier": 1.0, "delta": 1e-3, "seed": 0} | options.pop("private", {}))
    trainer = make_trainer(folder, callbacks=[private], **{"max_steps": 3} | options)
    trainer.fit(module, data)
    return trainer, private


def test_a_mean_over_tokens_is_refused_and_one_over_rows_is_not(tmp_path):
    with pytest.raises(CompatibilityError, match="loss must be the mean"):
        fit(Tokens(by_row=False), tmp_path)
    trainer, private = fit(Tokens(by_row=True), tmp_path)
    assert trainer.global_step == 3
    assert private.receipt.values["techniques"]["dp"]["steps"] == 3
    assert float(trainer.callback_metrics.get("dp/epsilon", 1.0)) > 0
    fit(Tokens(by_row=False), tmp_path, private={"check_loss": False})


@dataclasses.dataclass
class Rows:
    x: torch.Tensor
    counted: torch.Tensor


class Named(Tokens):
    """Takes its two tensors out of batches of any class."""

    def training_step(self, batch, index):
        values = vars(batch) if dataclasses.is_dataclass(batch) else batch
        return super().training_step(list(values.values()), index)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, c: collections.defaultdict(list, x=x, c=c),
        lambda x, c: types.MappingProxyType({"x": x, "c": c}),
        Rows,
    ],
    ids=["defaultdict", "read_only", "dataclass"],
)
def test_batches_of_any_class_are_halved(make, tmp_path):
    data = [(size * torch.randn(5, 3), (torch.arange(5) < size).float()) for size in range(1, 6) for _ in range(8)]
    loader = DataLoader(data, batch_size=10, collate_fn=lambda rows: make(*default_collate(rows)))
    _, private = fit(Named(by_row=True), tmp_path, data=loader)
    assert not private.session.techniques["dp"].checks_loss
    with pytest.raises(CompatibilityError, match="loss must be the mean"):
        fit(Named(by_row=False), tmp_path, data=loader)


class Recurrent(pl.LightningModule):
    """Starts from states that come with the batch, (layers, batch, width)."""

    def __init__(self, by_row):
        super().__init__()
        torch.manual_seed(0)
        layers = importlib.import_module("opacus.layers")
        self.lstm, self.gru = layers.DPLSTM(3, 4, 2, batch_first=True), layers.DPGRU(4, 2)
        self.by_row = by_row

    def training_step(self, batch, index):
        x, (h, c), start, y = batch
        hidden, _ = self.lstm(x, (h, c))
        outputs, _ = self.gru(hidden.transpose(0, 1), start)
        losses = (outputs[-1] - y).square().sum(1)
        return losses.mean() if self.by_row else losses.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_states(rows):
    x, h, c, start, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return x, (h.transpose(0, 1), c.transpose(0, 1)), start[None], y


@pytest.mark.parametrize("batch_size", [2, 5])
def test_initial_states_have_the_batch_in_their_second_dimension(batch_size, tmp_path):
    torch.manual_seed(1)
    parts = torch.randn(40, 5, 3), torch.randn(40, 2, 4), torch.randn(40, 2, 4), torch.randn(40, 2), torch.randn(40, 2)
    data = DataLoader(TensorDataset(*parts), batch_size=batch_size, shuffle=True, collate_fn=with_states)
    _, private = fit(Recurrent(by_row=True), tmp_path, data=data, max_steps=6)
    assert not private.session.techniques["dp"].checks_loss  # compared with its halves
    with pytest.raises(CompatibilityError, match="loss must be the mean"):
        fit(Recurrent(by_row=False), tmp_path, data=data, max_steps=6)


def test_limits_and_changing_accumulation_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="multiple of accumulate_grad_batches 2, got 3"):
        fit(Tokens(by_row=True), tmp_path, accumulate_grad_batches=2, limit_train_batches=3)
    with pytest.raises(CompatibilityError, match="overfit_batches must be 0"):
        fit(Tokens(by_row=True), tmp_path, overfit_batches=2)
    loaders = [DataLoader(TensorDataset(torch.zeros(40, 3))) for _ in range(2)]
    with pytest.raises(CompatibilityError, match="one DataLoader, got list"):
        fit(Tokens(by_row=True), tmp_path, data=loaders)


def test_short_epochs_repeat_no_draw(tmp_path, monkeypatch):
    drawn = []

    class Keeps(Tokens):
        def training_step(self, batch, index):
            if self.training:
                drawn.append(batch[0].flatten(1).sum().item())
            return super().training_step(batch, index)

    fit(Keeps(by_row=True), tmp_path, max_steps=6, limit_train_batches=2, private={"check_loss": False})
    assert len(set(drawn)) == len(drawn) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_draw_the_same_batches(workers, tmp_path):
    data = TensorDataset(torch.arange(600.0).view(40, 5, 3) / 600, torch.ones(40, 5))
    module = Tokens(by_row=True)
    fit(module, tmp_path, data=DataLoader(data, batch_size=10, num_workers=workers), max_steps=6)
    expected = Tokens(by_row=True)
    fit(expected, tmp_path, data=DataLoader(data, batch_size=10), max_steps=6)
    assert torch.equal(module.layer.weight, expected.layer.weight)
