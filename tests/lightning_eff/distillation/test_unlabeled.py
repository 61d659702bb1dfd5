"""Weak supervision through Lightning: the batch's own key tells, and training_step never sees it."""

import copy

import pytest
import torch
from lightning_world import BOTH, make_trainer
from plain_loop import begun_session, plain_step
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_eff import Distillation
from shared_core.errors import ConfigError

OPTIONS = {"alpha": 0.4, "unlabeled_field": "new", "divergence": "hard_label"}


def rows(flags=(0, 1, 1, 1, 1, 1, 0, 0)):
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(i % 3), "new": bool(flag)} for i, flag in enumerate(flags)]


def nets():
    torch.manual_seed(0)
    return nn.Linear(4, 3), nn.Linear(4, 3)


def module_of(net):
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            assert "new" not in batch
            # the student is given no labels: they are the batch's
            return F.cross_entropy(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(folder, data, **more):
    student, teacher = nets()
    callback = Distillation(teacher=teacher, student="net", **OPTIONS)
    trainer = make_trainer(folder, BOTH[0], callbacks=[callback], max_epochs=2, **more)
    trainer.fit(module_of(student), DataLoader(data, batch_size=2))
    return student, callback.receipt["techniques"]["distill"]


def bare(accumulate):
    student, teacher = nets()
    session, optimizer = begun_session({"distill": {"teacher": teacher, **OPTIONS}}, student, 8 // accumulate)
    for index, batch in enumerate(list(DataLoader(rows(), batch_size=2)) * 2, 1):
        batch = session.techniques["distill"].prepare_batch(batch)
        (session.loss(F.cross_entropy(student(batch["x"]), batch["labels"])) / accumulate).backward()
        if index % accumulate == 0:
            plain_step(session, optimizer)
    return student


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_loop_of_ones_own(tmp_path, accumulate):
    # the second and third micro-batches have no label: the mean of their cross-entropy is 0/0
    student, told = fit(tmp_path, rows(), accumulate_grad_batches=accumulate)
    for first, second in zip(student.parameters(), bare(accumulate).parameters(), strict=True):
        assert torch.equal(first, second)
        assert first.isfinite().all()
    assert (told["labeled_examples"], told["unlabeled_examples"]) == (6, 10)


def test_data_without_the_key_are_refused_before_a_step(tmp_path):
    data = copy.deepcopy(rows())
    for row in data:
        del row["new"]
    with pytest.raises(ConfigError, match="'new' must be a key of every batch, got x, labels"):
        fit(tmp_path, data)
