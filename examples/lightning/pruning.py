"""Pruning in Lightning: nine of ten weights of the hidden layer become zero."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import Pruning

if __name__ == "__main__":
    train, test = digits()
    model = Classifier()
    pruning = Pruning(sparsity=0.9, begin=0.2, end=0.7, every=20, skip=["last"])
    pl.Trainer(max_epochs=10, callbacks=[pruning], **QUIET).fit(model, train)

    report = pruning.receipt["techniques"]["prune"]
    print(f"{report['pruned']:,} of {report['numel']:,} weights are zero, accuracy {model.accuracy(test):.3f}")
