"""Activation compression in Lightning: what backward needs of a convolutional net is kept in 16 bits."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, classes, digits
from torch import nn

from efftrain.lightning import ActivationCompression


class Convolutional(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(1024, classes()),
        )  # fmt: skip


if __name__ == "__main__":
    train, test = digits()
    model = Convolutional()
    compression = ActivationCompression(pack="bf16")
    pl.Trainer(max_epochs=4, callbacks=[compression], **QUIET).fit(model, train)

    share = compression.receipt["techniques"]["activations"]["share_saved"]
    print(f"saved activations: {share:.0%} smaller, accuracy {model.accuracy(test):.3f}")
