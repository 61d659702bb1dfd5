"""A lottery ticket search in Lightning: do the weights matter, or which ones are kept?

Each round trains, prunes two thirds of the remaining weights, and resets the others to their values at step 40. The
control keeps as many weights at random places. For your own script: eff lottery.
"""

import tempfile

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import EffCallback
from shared_core.runs import LotterySearch


def train(recipe):
    pl.seed_everything(0, verbose=False)  # every round takes the same steps up to step 40
    pl.Trainer(max_epochs=6, callbacks=[EffCallback(recipe)], **QUIET).fit(Classifier(), *digits())


if __name__ == "__main__":
    search = LotterySearch(
        rounds=2, rate=0.67, rewind_to=40, controls=["random_mask"], control_rounds=[2], metric="val_acc"
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = search.run(train, folder).rows
    dense, ticket = (row for row in rows if row.round != 1 and row.control == "none")
    (control,) = (row for row in rows if row.control == "random_mask")
    print(
        f"accuracy: dense {dense.quality:.3f}, ticket of {ticket.left:.0%} of the weights {ticket.quality:.3f}, "
        f"as many at random places {control.quality:.3f}"
    )
