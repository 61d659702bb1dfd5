"""A Trainer that trains on with callbacks which its module makes anew for every `fit`."""

import torch
from lightning_world import difference, everything, fit, hook_callback, make_trainer, module_class

from lightning_eff import EffCallback

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
