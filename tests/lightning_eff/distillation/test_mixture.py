"""The mixture where micro-batches count differently: in Lightning, and in a loop of one's own, each weighs the same."""

import pytest
import torch
from lightning_world import BOTH, make_trainer
from plain_loop import begun_session
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_eff import Distillation
from shared_core.errors import ConfigError, TrainingError

ALPHA, T, CLASSES = 0.3, 2.0, 5
UNEQUAL, EQUAL = (6, 1, 3, 2, 5, 1, 4, 2), (3,) * 8


class Tagger(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens, labels=None):
        logits = self.head(self.table(tokens).tanh())
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def rows(lengths):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(9, (len(lengths), 6), generator=generator)
    labels = torch.randint(CLASSES, tokens.shape, generator=generator)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return [{"tokens": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def reference(parts):
    """The mean over micro-batches of each one's mixture, in float64."""
    student, teacher = Tagger(0).double(), Tagger(1).double()
    for part in parts:
        ours = student(**part)
        counts = part["labels"] != -100
        p = (teacher(part["tokens"])["logits"][counts].detach() / T).softmax(-1)
        soft = T**2 * (p * (p.log() - (ours["logits"][counts] / T).log_softmax(-1))).sum(-1).mean()
        ((ALPHA * ours["loss"] + (1 - ALPHA) * soft) / len(parts)).backward()
    return [value.grad.float() for value in student.parameters()]


def lightning(folder, data, size, accumulate, own_forward=False, **options):
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Tagger(0)

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def on_before_optimizer_step(self, optimizer):
            self.found = [value.grad.clone() for value in self.parameters()]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    if own_forward:
        Module.forward = lambda self, **batch: self.net(**batch)
    options = {"student": "net", "temperature": T, "alpha": ALPHA, **options}
    module, callback = Module(), Distillation(teacher=Tagger(1), **options)
    trainer = make_trainer(folder, BOTH[0], callbacks=[callback], max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(data, batch_size=size))
    return module.found, callback.receipt["notes"]


def bare(data, size, accumulate):
    student = Tagger(0)
    session, optimizer = begun_session(
        {"distill": {"teacher": Tagger(1), "temperature": T, "alpha": ALPHA}}, student, 2, lr=0.0
    )
    for _ in range(2):
        optimizer.zero_grad()
        for batch in DataLoader(data, batch_size=size):
            (session.loss(student(**batch)["loss"]) / accumulate).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
    return [value.grad for value in student.parameters()], session.notes


@pytest.mark.parametrize("lengths", [UNEQUAL, EQUAL])
@pytest.mark.parametrize(("size", "accumulate"), [(8, 1), (2, 4), (1, 8)])
def test_each_micro_batch_is_averaged_by_itself_and_unequal_ones_are_told_once(tmp_path, lengths, size, accumulate):
    data = rows(lengths)
    expected = reference(list(DataLoader(data, batch_size=size)))
    for found, notes in (lightning(tmp_path, data, size, accumulate), bare(data, size, accumulate)):
        for ours, value in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, value, rtol=0, atol=1e-6)
        told = [note for note in notes if "positions: each is averaged by itself" in note]
        assert len(told) == (lengths is UNEQUAL and accumulate > 1)


def test_a_student_that_the_step_never_calls_is_refused_in_the_first_step_of_a_run_that_begins_later(
    tmp_path, monkeypatch
):
    calls, forward = [], Tagger.forward
    monkeypatch.setattr(Tagger, "forward", lambda self, *args, **batch: calls.append(0) or forward(self, **batch))
    with pytest.raises(TrainingError, match=r"the student's forward must run before the loss.*set distill.student"):
        lightning(tmp_path, rows(EQUAL), 4, 1, own_forward=True, student=None, begin=3)
    assert len(calls) == 1
    # a module without a forward cannot be the student, which shows before the first step
    with pytest.raises(ConfigError, match='pass student="net"'):
        lightning(tmp_path, rows(EQUAL), 4, 1, student=None)
    assert len(calls) == 1
