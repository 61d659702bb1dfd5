"""A lottery ticket search in the Hugging Face Trainer: is it the weights or the structure that win?

Each round trains, prunes two thirds of the weights left, and sets the others back to those of step 40; the control
keeps as many weights at random places. For your own script: eff lottery.
Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/lottery_ticket.py
"""

import tempfile

from digits_hf import make_trainer

from hf_eff import EffCallback
from shared_core.runs import LotterySearch

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:

        def train(recipe):
            make_trainer(folder, callbacks=[EffCallback(recipe)], num_train_epochs=4, eval_strategy="epoch").train()

        search = LotterySearch(
            rounds=2, rate=0.67, rewind_to=40, controls=["random_mask"], control_rounds=[2], metric="eval_accuracy"
        )
        curve = search.run(train, folder + "/lottery")
        for row in curve.rows:
            name = "dense" if row.round == 0 else f"round {row.round}" if row.control == "none" else row.control
            print(f"{name:16}weights left {row.left:4.0%}, accuracy {row.quality:.3f}")
