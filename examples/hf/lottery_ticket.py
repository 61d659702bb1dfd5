"""A lottery ticket search in the Hugging Face Trainer: do the weights matter, or which ones are kept?

Each round trains, prunes two thirds of the remaining weights, and resets the others to their values at step 40. The
control keeps as many weights at random places. For your own script: eff lottery.
"""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import EffCallback
from shared_core.runs import LotterySearch


def train(recipe):
    settings = arguments(num_train_epochs=4, eval_strategy="epoch")
    Trainer(vision_transformer(), settings, callbacks=[EffCallback(recipe)], **splits()).train()


if __name__ == "__main__":
    search = LotterySearch(
        rounds=2, rate=0.67, rewind_to=40, controls=["random_mask"], control_rounds=[2], metric="eval_accuracy"
    )
    rows = search.run(train, arguments().output_dir + "/lottery").rows
    dense, ticket = (row for row in rows if row.round != 1 and row.control == "none")
    (control,) = (row for row in rows if row.control == "random_mask")
    print(
        f"accuracy: dense {dense.quality:.3f}, ticket of {ticket.left:.0%} of the weights {ticket.quality:.3f}, "
        f"as many at random places {control.quality:.3f}"
    )
