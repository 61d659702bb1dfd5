"""Running averages of a digits classifier's weights at a constant, high learning rate, validated while training."""

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import WeightAverage

torch.set_num_threads(1)  # more only get into each other's way with a model so small

AVERAGES = {
    "the last weights": [],
    "exponential": [WeightAverage(kind="ema", decay=0.97)],
    "of the last half": [WeightAverage(kind="swa", begin=0.5)],
}


def main() -> None:
    train, test = digits()
    for name, callbacks in AVERAGES.items():
        model = Classifier(lr=1e-2)
        make_trainer(max_epochs=6, callbacks=callbacks).fit(model, train, test)
        updates = [callback.receipt["techniques"]["average"]["updates"] for callback in callbacks]
        print(f"{name:24} {updates[0] if updates else 1:4} weights, accuracy {model.accuracy(test):.3f}")


if __name__ == "__main__":
    main()
