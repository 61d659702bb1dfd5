"""FP8 training in Lightning.

A GPU with FP8 products runs it natively. Other devices emulate the same numbers: they show accuracy, not speed.
"""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import Fp8

if __name__ == "__main__":
    train, test = digits()
    model = Classifier()
    fp8 = Fp8(recipe="rowwise", include=["first"])  # the other layer has ten outputs, no multiple of 16
    pl.Trainer(max_epochs=5, callbacks=[fp8], **QUIET).fit(model, train)

    (layer,) = fp8.receipt["techniques"]["fp8"]["per_layer"]
    products = sum(layer["emulated"].values()) + sum(layer["scaled_mm"].values())
    print(f"{products:,} products in FP8, accuracy {model.accuracy(test):.3f}")
