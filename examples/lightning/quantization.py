"""Quantization-aware training in Lightning: weights of two bits, inputs of eight."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import QuantizationAwareTraining

if __name__ == "__main__":
    train, test = digits()
    model = Classifier()
    qat = QuantizationAwareTraining(scheme="int8", weight_bits=2, begin=0.2)
    pl.Trainer(max_epochs=10, callbacks=[qat], **QUIET).fit(model, train)

    values = len(model.net[1].weight[0].unique())
    print(f"{values} different weights for each output, accuracy {model.accuracy(test):.3f}")
