"""A running average of a model's weights in Lightning, at a constant, high learning rate."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import WeightAverage

if __name__ == "__main__":
    train, test = digits()
    accuracies = []
    for callbacks in ([], [WeightAverage(kind="ema", decay=0.97)]):
        model = Classifier(lr=1e-2)
        pl.Trainer(max_epochs=6, callbacks=callbacks, **QUIET).fit(model, train, test)
        accuracies.append(model.accuracy(test))
    print(f"accuracy: last weights {accuracies[0]:.3f}, their exponential average {accuracies[1]:.3f}")
