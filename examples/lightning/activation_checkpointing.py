"""Activation checkpointing in Lightning: less memory, and the same weights to the last bit."""

import pytorch_lightning as pl
import torch
from digits_lightning import QUIET, Classifier, classes, digits
from torch import Tensor, nn

from efftrain.lightning import ActivationCheckpointing


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm2d(channels), nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(torch.relu(self.norm(self.first(x)))))


class Residual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        blocks = (ResidualBlock(16) for _ in range(4))
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes()))
        self.net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), *blocks, *head)


if __name__ == "__main__":
    train, test = digits()
    checkpointing = ActivationCheckpointing(policy="block")
    weights = []
    for callbacks in ([], [checkpointing]):
        model = Residual()
        pl.seed_everything(0)
        pl.Trainer(max_epochs=2, callbacks=callbacks, **QUIET).fit(model, train)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))

    saved = checkpointing.receipt["techniques"]["checkpointing"]["saved_bytes"]
    same = "equal" if torch.equal(*weights) else "DIFFERENT"
    print(f"activations: {saved / 2**10:.0f} KiB less for each batch, weights {same}")
