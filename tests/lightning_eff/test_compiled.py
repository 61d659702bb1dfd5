"""A LightningModule that is compiled as a whole."""

import pytest
import torch
from lightning_world import difference, everything, fit, loader, make_module, make_trainer

from lightning_eff import EffCallback


@pytest.mark.parametrize("options", [{"teacher": "ema"}, {"teacher": "mutual", "peers": 2}])
def test_a_copy_of_the_student_computes_with_its_own_weights(options, tmp_path):
    def trained(compiles):
        module = make_module(dropout=0.0)
        module.log = lambda *args, **kwargs: None  # which dynamo does not trace
        trainer = make_trainer(tmp_path, callbacks=[EffCallback({"distill": options})], max_epochs=1)
        compiled = torch.compile(module, backend="eager") if compiles else module
        fit(trainer, compiled, train=loader(drop_last=True))
        return everything(trainer, module)

    assert difference(trained(False), trained(True)) == []
