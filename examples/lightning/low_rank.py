"""Train a digits classifier, then fine-tune it with layers of low rank: kept as factors, or multiplied out."""

import copy

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import LowRank

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    train, test = digits()
    whole = Classifier(width=256)
    make_trainer().fit(whole, train)
    for name, callbacks in (
        ("whole", None),
        ("rank 8", [LowRank(rank=8)]),
        ("90 % of the energy", [LowRank(rank="energy:0.9")]),
        ("rank 8 for these inputs", [LowRank(rank=8, decomposition="whitened")]),
        ("rank 8, multiplied out", [LowRank(rank=8, merge=True)]),
    ):
        model = copy.deepcopy(whole)
        if callbacks is not None:
            make_trainer(max_epochs=3, callbacks=callbacks).fit(model, train)
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:26}accuracy {model.accuracy(test):.3f}, {size:6,} parameters")


if __name__ == "__main__":
    main()
