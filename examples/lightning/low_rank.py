"""Low rank in Lightning: layers of a trained model become products of smaller ones, then it trains on."""

import copy

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import LowRank


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    train, test = digits()
    whole = Classifier(width=256)
    pl.Trainer(max_epochs=10, **QUIET).fit(whole, train)

    model = copy.deepcopy(whole)
    pl.Trainer(max_epochs=3, callbacks=[LowRank(rank=8, decomposition="whitened")], **QUIET).fit(model, train)
    print(
        f"{size(whole):,} -> {size(model):,} parameters, "
        f"accuracy {whole.accuracy(test):.3f} -> {model.accuracy(test):.3f}"
    )
