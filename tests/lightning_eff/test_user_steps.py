"""Modules that decide themselves when their optimizer steps, and when their layers get a shape."""

import pytest
import torch
from lightning_world import BOTH, difference, everything, fit, make_module, make_trainer, module_class
from torch import nn

from lightning_eff import EffCallback, Pruning
from shared_core.errors import TrainingError


class EverySecondBatch(module_class(BOTH[0])):
    """Accumulates as Lightning's documentation of `optimizer_step` shows it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def test_batches_without_a_step_are_not_skipped_steps_and_schedules_move_as_without_us(tmp_path):
    def trained(recipe):
        callback = EffCallback(recipe)
        trainer = make_trainer(tmp_path, callbacks=[callback])
        torch.manual_seed(0)
        module = EverySecondBatch()
        fit(trainer, module)
        return callback, everything(trainer, module)

    _, bare = trained({})
    callback, ours = trained({"activations": {"pack": "exact", "min_size": 1}})
    assert callback.receipt["steps"] == {"applied": 9, "skipped": 0, "planned": 18}
    assert difference(bare, ours) == []


def test_lazy_layers_are_told_to_be_made_first(tmp_path):
    class Lazy(module_class(BOTH[0])):
        def __init__(self):
            super().__init__()
            self.net[0] = nn.LazyLinear(16)

    def trained(module):
        callback = EffCallback({"prune": {"sparsity": 0.5}})
        fit(make_trainer(tmp_path, callbacks=[callback], max_epochs=1), module)
        return callback.receipt["techniques"]["prune"]["sparsity"]

    with pytest.raises(TrainingError, match=r"got none for net\.0\.weight, net\.0\.bias of lazy layers; pass a batch"):
        trained(Lazy())
    made = Lazy()
    made(torch.randn(2, 8))
    assert trained(made) == 0.5


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.AdamW])
def test_dead_gradients_move_no_live_weight_where_nothing_is_clipped(optimizer, tmp_path):
    def trained(zeroed):
        module = make_module(dropout=0.0)
        module.configure_optimizers = lambda: optimizer(module.parameters(), lr=0.01)
        if zeroed:
            for weight in (weight for weight in module.parameters() if weight.ndim > 1):
                weight.register_hook(lambda gradient, weight=weight: gradient.masked_fill(weight == 0, 0.0))
        prune = Pruning(sparsity=0.5, begin=0, schedule="one_shot")
        fit(make_trainer(tmp_path, callbacks=[prune]), module)
        return [weight.detach() for weight in module.parameters() if weight.ndim > 1]

    for weight, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(weight, other)
        assert (weight == 0).float().mean() > 0.3
