"""DP-SGD on MNIST (Abadi et al. 2016, arXiv:1607.00133, section 5.2): accuracy at epsilon 0.5, 2 and 8.

As in the paper: images are projected onto 60 principal directions, found in a covariance of images normed to length 1
with Gaussian noise on it; one layer of 1000 hidden neurons with ReLU; delta 1e-5. An example's whole gradient is
clipped to 4, where the paper clips each layer's to 4. The noise of the directions is the paper's, 16, 7 and 4 times
what one image can change, and counts as a step on everybody; that of the gradients is what uses epsilon up in the few
epochs here, where the paper trains until a noise of 8, 4 or 2 has used it up. So few epochs need lots of 2,400 examples
where the paper's have 600, and a learning rate that starts at 3, 3 and 4 and falls linearly to a tenth, where the
paper's falls from 0.1 to 0.052. They were chosen with plain torch on 55,000 of the training images, with the others to
validate.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from digits28 import Batch
from mnist import errors
from replica.privacy import Silent
from replicas import Published, Runs, mean, published, reaches, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shared_core import Recipe, Session
from shared_core.privacy import epsilon, noise_multiplier_for

SEEDS, DIRECTIONS, HIDDEN, LOT, CLIP, DELTA, FALLS_TO = 3, 60, 1000, 2400, 4.0, 1e-5, 0.1
# epsilon: noise of the directions, epochs, learning rate, accuracy of the paper in %
TARGETS = {0.5: (16.0, 5, 3.0, 90.0), 2.0: (7.0, 20, 3.0, 95.0), 8.0: (4.0, 40, 4.0, 97.0)}


class Rows(TensorDataset):
    """Examples that are fetched a batch at a time."""

    def __getitems__(self, chosen: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[chosen] for tensor in self.tensors)


def private_directions(images: Tensor, noise: float, seed: int) -> Tensor:
    """Return principal directions, as columns: an image adds or takes away at most 1 of the covariance's norm."""
    noises = noise * torch.randn(784, 784, generator=torch.Generator().manual_seed(seed))
    covariance = images.T @ images + noises.triu() + noises.triu(1).T
    return torch.linalg.eigh(covariance).eigenvectors[:, -DIRECTIONS:]


def run(seed: int, target: float, data: tuple[Batch, Batch], quick: bool) -> dict[str, Any]:
    """Return accuracy in percent, and what was spent."""
    (images, labels), (held, expected) = data
    images, held = images.flatten(1), held.flatten(1)
    noise_of_directions, epochs, learning_rate, _ = TARGETS[target]
    directions = private_directions(F.normalize(images), noise_of_directions, seed)
    spent = (noise_of_directions, 1.0, 1)
    epochs = 1 if quick else epochs
    steps, rate = epochs * len(images) // LOT, LOT / len(images)
    noise = noise_multiplier_for(target, rate, steps, DELTA, spent=[spent])
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(DIRECTIONS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    recipe = {"dp": {"max_grad_norm": CLIP, "delta": DELTA, "seed": seed, "noise_multiplier": noise}}
    session = Session(Recipe.from_dict(recipe), services=Silent())
    session.attach(model)
    examples = Rows(images @ directions, labels)
    loader = session.techniques["dp"].loader(DataLoader(examples, batch_size=LOT, shuffle=True, collate_fn=tuple))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, FALLS_TO, epochs * len(loader))
    session.begin([optimizer], total_steps=epochs * len(loader), clips_gradients=False)
    for _ in range(epochs):
        for inputs, wanted in loader:
            session.loss(F.cross_entropy(model(inputs), wanted)).backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            optimizer.zero_grad()
            falls.step()
    session.finish()
    return {
        "accuracy": 100 - 100 * errors(model, (held @ directions, expected)) / len(held),
        "epsilon": epsilon([spent, (noise, rate, epochs * len(loader))], DELTA),
        "noise": noise,
    }


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    rows = []
    for target, (_, epochs, _, paper) in TARGETS.items():
        trained = functools.partial(run, target=target, data=data, quick=quick)
        found = runs.seeds(1 if quick else SEEDS, trained, f"epsilon {target:g}")
        accuracies = [one["accuracy"] for one in found]
        rows.append(
            Published(
                f"epsilon {target:g}, delta {DELTA:g}: accuracy",
                f"{paper:g} %",
                f"{spread(accuracies, 2)} %",
                f"lots of {LOT:,}, {epochs} epochs with noise {mean([one['noise'] for one in found]):.2f}; "
                f"spent {max(one['epsilon'] for one in found):.3f}",
                reaches(accuracies, paper),
            )
        )
    return rows


if __name__ == "__main__":
    published(measure)
