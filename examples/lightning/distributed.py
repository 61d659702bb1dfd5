"""Prune a sharded model: FSDP2 in two processes, without a line of sharding in the module.

Run: python examples/lightning/distributed.py; Trainer(devices=2, strategy="eff_fsdp") starts both processes
"""

from digits_lightning import Classifier, digits, make_trainer
from torch import nn

from lightning_eff import Pruning


class Deep(Classifier):
    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), *blocks, self.net[-1])


def main() -> None:
    train, test = digits()
    model = Deep()
    pruning = Pruning(sparsity=0.8, begin=0.2, end=0.7, every=20, skip=["last"])
    trainer = make_trainer(callbacks=[pruning], devices=2, strategy="eff_fsdp", max_epochs=5)
    trainer.fit(model, train)
    (accuracy,) = trainer.validate(model, test, verbose=False)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    if trainer.is_global_zero:
        sparsity = pruning.receipt["techniques"]["prune"]["sparsity"]
        print(f"each process holds {held:,} of {whole:,} weights, {sparsity:.0%} of the pruned layers' are zero")
        print(f"accuracy {accuracy['val_acc']:.3f}")


if __name__ == "__main__":
    main()
