"""Train a small residual network with the activations of whole stages recomputed: the same weights, to the bit."""

import pytorch_lightning as pl
import torch
from digits_lightning import Classifier, classes, digits, make_trainer
from torch import Tensor, nn

from lightning_eff import ActivationCheckpointing

torch.set_num_threads(1)  # more only get into each other's way with a model so small


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, stride, 1), nn.Conv2d(out, out, 3, padding=1)
        self.norm, self.other_norm, self.drop = nn.BatchNorm2d(out), nn.BatchNorm2d(out), nn.Dropout2d(0.1)
        self.short = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.relu(self.norm(self.first(x))))
        return torch.relu(self.other_norm(self.second(y)) + self.short(x))


class ConvNet(Classifier):
    def __init__(self) -> None:
        super().__init__()
        stages = [
            nn.Sequential(ResidualBlock(channels, out, stride), ResidualBlock(out, out, 1))
            for channels, out, stride in ((1, 8, 1), (8, 16, 2), (16, 32, 2))
        ]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes()))
        self.net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *stages, *head)


def main() -> None:
    train, test = digits()
    weights: list[Tensor] = []
    for policy in (None, "stage", "block"):
        model, callbacks = ConvNet(), [ActivationCheckpointing(policy=policy)] if policy else []
        pl.seed_everything(0)
        make_trainer(max_epochs=2, callbacks=callbacks).fit(model, train)
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        told = callbacks[0].session.receipt()["techniques"]["checkpointing"] if callbacks else {"saved_bytes": 0}
        print(
            f"{policy or 'nothing':8} dropped {told['saved_bytes'] / 2**10:.0f} KiB of a batch's activations; "
            f"weights {'equal' if torch.equal(weights[0], weights[-1]) else 'DIFFERENT'}, "
            f"accuracy {model.accuracy(test):.3f}"
        )


if __name__ == "__main__":
    main()
