"""The loop of older Trainers, cut down to what it does around clipping and its own sum of losses."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from hf_eff import Pruning
from hf_eff._private_names import OlderLoop

pytestmark = pytest.mark.matrix

LOSSES = torch.rand(12, generator=torch.Generator().manual_seed(0)).split(1)


class Older:
    """Trains on `LOSSES`, two to a step, and logs every third step.

    Args:
        events: What it does, in order.
        max_grad_norm: 0 for no clipping.
    """

    def __init__(self, events, max_grad_norm=1.0):
        self.events, self.max_grad_norm, self.logged = events, max_grad_norm, []
        self.args, self.model_wrapped = SimpleNamespace(device="cpu"), torch.nn.Linear(1, 1, bias=False)
        self.accelerator = SimpleNamespace(clip_grad_norm_=self._clip)
        handled = dict.fromkeys(("on_train_begin", "on_pre_optimizer_step"), lambda *args: events.append("handled"))
        self.callback_handler = SimpleNamespace(**handled)

    def _clip(self, parameters, max_norm):
        self.events.append(("clipped", [parameter.shape for parameter in parameters], max_norm))

    def training_step(self, index):
        return LOSSES[index].squeeze()

    def _load_rng_state(self, checkpoint):
        self.events.append(("restored", checkpoint))

    def _maybe_log_save_evaluate(self, tr_loss, step):
        self.saved = self._tr_loss.clone()
        if step % 3 == 0:
            self.logged.append(tr_loss.item())
            tr_loss -= tr_loss
            self._total_loss_scalar += self.logged[-1]

    def _inner_training_loop(self, first=0, resumed=None, steps=6, resume_from_checkpoint=None):
        tr_loss, self._total_loss_scalar = torch.tensor(0.0), 0.0
        state = SimpleNamespace(epoch=float(first // 6), num_train_epochs=1)
        self.callback_handler.on_train_begin(None, state, None)
        if resumed is not None:  # as hooks do in that event
            self._tr_loss = resumed.clone()
            self._total_loss_scalar -= resumed.item()
        for step in range(first, steps):
            for index in (2 * step, 2 * step + 1):
                tr_loss = tr_loss + self.training_step(index)
            if self.max_grad_norm > 0:
                self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), self.max_grad_norm)
            self.callback_handler.on_pre_optimizer_step(None)
            self._maybe_log_save_evaluate(tr_loss, step + 1)
        self._maybe_log_save_evaluate(tr_loss, steps)
        self._total_loss_scalar += tr_loss.item()


def watched(events, **settings):
    trainer = Older(events, **settings)
    older = OlderLoop(trainer)
    for name in ("_clip_grad_norm", "_get_grad_norm"):
        method = getattr(trainer, name)
        setattr(trainer, name, lambda *args, method=method, name=name: [events.append(name), method(*args)][1])
    older.watch()
    older.watch_accelerator()
    return trainer


@pytest.mark.parametrize(
    ("max_grad_norm", "expected"),
    [(0.5, ["_clip_grad_norm", ("clipped", [(1, 1)], 0.5), "handled"]), (0.0, ["_get_grad_norm", "handled"])],
)
def test_a_method_around_clipping_is_called_once_a_step_and_before_it(max_grad_norm, expected):
    events = []
    watched(events, max_grad_norm=max_grad_norm)._inner_training_loop()
    assert events == ["handled", *6 * expected]


def test_another_model_is_clipped_to_the_same_norm():
    events = []
    trainer = watched(events)
    trainer._inner_training_loop()
    trainer._clip_grad_norm(torch.nn.Linear(3, 2, bias=False))
    assert events[-1] == ("clipped", [(2, 3)], 1.0)


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_the_sum_of_losses_goes_on_bit_for_bit(stop):
    whole, stopped, resumed = watched([]), watched([]), watched([])
    whole._inner_training_loop()
    stopped._inner_training_loop(steps=stop)
    resumed._inner_training_loop(stop, stopped.saved)
    assert resumed.logged == whole.logged[stop // 3 :]
    assert resumed._total_loss_scalar == pytest.approx(sum(LOSSES[2 * stop :]).item())


def test_a_run_without_a_step_to_go_restores_generators_and_counts_no_loss_of_its_own():
    events = []
    trainer = watched(events)
    trainer._inner_training_loop(5, torch.tensor(2.0), steps=5, resume_from_checkpoint="checkpoint-5")
    assert events[1:] == [("restored", "checkpoint-5")]
    assert trainer._total_loss_scalar == 0


def test_a_trainer_that_has_the_methods_keeps_its_own(make, tmp_path):
    trainer = make.trainer(tmp_path)
    assert (OlderLoop.of(trainer) is None) == hasattr(Trainer, "_clip_grad_norm")


def test_gradients_that_accelerate_divides_once_more_are_told(make, tmp_path):
    trainer = make.trainer(
        tmp_path, callbacks=[Pruning(sparsity=0.5)], per_device_train_batch_size=1, gradient_accumulation_steps=2
    )
    trainer.accelerator.gradient_accumulation_steps = 2
    trainer.train()
    notes = trainer.callback_handler.callbacks[0].session.receipt()["notes"]
    assert any("2 micro-batches" in note for note in notes)
