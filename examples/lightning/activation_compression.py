"""A convolutional net in Lightning: what backward needs, kept smaller, and what that costs."""

import torch
from digits_lightning import Classifier, classes, digits, make_trainer
from torch import nn

from lightning_eff import ActivationCompression

torch.set_num_threads(1)  # more only get into each other's way with a model so small


class Convolutional(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(1024, classes()),
        )  # fmt: skip


def main() -> None:
    train, test = digits()
    for pack in (None, "exact", "bf16", "int8"):
        torch.manual_seed(0)  # dropout and the order of the examples
        model, callbacks = Convolutional(), [ActivationCompression(pack=pack)] if pack else []
        make_trainer(max_epochs=4, callbacks=callbacks).fit(model, train)
        told = callbacks[0].receipt.values["techniques"]["activations"] if pack else {"share_saved": 0.0}
        print(f"{pack or 'plain':8}activations saved {told['share_saved']:.0%}, accuracy {model.accuracy(test):.3f}")


if __name__ == "__main__":
    main()
