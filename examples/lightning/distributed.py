"""Pruning of a sharded model in Lightning: FSDP2 in two processes, without a line of sharding in the module.

Run: python examples/lightning/distributed.py; the Trainer starts the second process itself.
"""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits
from torch import nn

from efftrain.lightning import Pruning


class Deep(Classifier):
    def __init__(self) -> None:
        super().__init__(width=64)
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *blocks, self.net[-1])


if __name__ == "__main__":
    train, test = digits()
    model = Deep()
    pruning = Pruning(sparsity=0.8, begin=0.2, end=0.7, every=20, skip=["last"])
    trainer = pl.Trainer(max_epochs=5, devices=2, strategy="eff_fsdp", callbacks=[pruning], **QUIET)
    trainer.fit(model, train)

    (result,) = trainer.validate(model, test, verbose=False)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    sparsity = pruning.receipt["techniques"]["prune"]["sparsity"]
    if trainer.is_global_zero:
        print(
            f"each process holds {held:,} of {whole:,} weights, {sparsity:.0%} of the pruned ones are zero, "
            f"accuracy {result['val_acc']:.3f}"
        )
