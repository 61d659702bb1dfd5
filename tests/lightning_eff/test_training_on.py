"""A Trainer that trains on with callbacks which its module makes anew for every `fit`."""

import pytest
import torch
from lightning_world import difference, everything, fit, hook_callback, make_module, make_trainer, module_class

from lightning_eff import EffCallback
from shared_core.errors import TrainingError

NAMESPACE = "pytorch_lightning"


def test_what_was_pruned_stays_pruned_under_a_new_callback(tmp_path):
    kept = EffCallback({"prune": {"sparsity": 0.5}})

    class MakesNew(module_class(NAMESPACE)):
        def configure_callbacks(self):
            return [EffCallback({"prune": {"sparsity": 0.5}})]

    class Keeps(module_class(NAMESPACE)):
        def configure_callbacks(self):
            return [kept]

    def trained(kind):
        torch.manual_seed(0)
        module = kind()
        trainer = make_trainer(tmp_path, NAMESPACE, max_epochs=1)
        fit(trainer, module)
        mask = module.net[0].weight == 0

        def check(trainer):
            assert (module.net[0].weight[mask] == 0).all()

        trainer.callbacks.append(hook_callback(NAMESPACE, on_train_batch_end=check))
        trainer.fit_loop.max_epochs = 2
        fit(trainer, module)
        (callback,) = [one for one in trainer.callbacks if isinstance(one, EffCallback)]
        assert (callback is kept) == (kind is Keeps)
        assert callback.receipt["steps"]["applied"] == 12
        return everything(trainer, module)

    assert difference(trained(MakesNew), trained(Keeps)) == []


@pytest.mark.parametrize("max_epochs", [1, 2])
def test_another_module_is_refused_by_a_trainer_that_has_trained(max_epochs, tmp_path):
    callback = EffCallback({"prune": {"sparsity": 0.5, "begin": 0, "schedule": "one_shot"}})
    trainer, first, second = make_trainer(tmp_path, max_epochs=1, callbacks=[callback]), make_module(), make_module()
    fit(trainer, first)
    trainer.fit_loop.max_epochs = max_epochs
    with pytest.raises(TrainingError, match="must go on with the module that this Trainer has trained"):
        fit(trainer, second)
    assert all(
        torch.equal(weight, other)
        for weight, other in zip(second.parameters(), make_module().parameters(), strict=True)
    )

    trainer.fit_loop.max_epochs = 2
    fit(trainer, first)  # the one that it has trained trains on
    assert callback.receipt["steps"]["applied"] == 12
    fit(make_trainer(tmp_path, max_epochs=1, callbacks=[callback]), second)
    assert callback.receipt["steps"]["applied"] == 6
    for module in (first, second):
        assert sum((module.net[index].weight == 0).sum() for index in (0, 4)) == (8 * 16 + 16 * 4) // 2
