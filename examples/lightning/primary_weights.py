"""Primary weights in Lightning: a bf16 model keeps small updates that rounding would lose."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import PrimaryWeights

if __name__ == "__main__":
    train, test = digits()
    accuracies = []
    for callbacks in ([], [PrimaryWeights(kind="fp32_copy")]):
        model = Classifier(lr=1e-4)
        pl.Trainer(max_epochs=8, precision="bf16-true", callbacks=callbacks, **QUIET).fit(model, train)
        accuracies.append(model.float().accuracy(test))
    print(f"accuracy in bf16: {accuracies[0]:.3f} alone, {accuracies[1]:.3f} with a float32 copy of the weights")
