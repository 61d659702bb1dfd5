"""Search a lottery ticket of a digits classifier: is it the weights or the structure that win?

Each round trains, prunes two thirds of the weights left, and sets the others back to those of step 40; the control
keeps as many weights at random places. For your own script: eff lottery.
"""

import tempfile

import pytorch_lightning as pl
import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import EffCallback
from shared_core.runs import LotterySearch

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    loader, test = digits()

    def train(recipe):
        pl.seed_everything(0, verbose=False)  # steps before 40 are then the dense run's
        make_trainer(callbacks=[EffCallback(recipe)], max_epochs=6).fit(Classifier(), loader, test)

    search = LotterySearch(
        rounds=2, rate=0.67, rewind_to=40, controls=["random_mask"], control_rounds=[2], metric="val_acc"
    )
    with tempfile.TemporaryDirectory() as folder:
        curve = search.run(train, folder)
    for row in curve.rows:
        name = "dense" if row.round == 0 else f"round {row.round}" if row.control == "none" else row.control
        print(f"{name:16}weights left {row.left:4.0%}, accuracy {row.quality:.3f}")


if __name__ == "__main__":
    main()
