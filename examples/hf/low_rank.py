"""Low rank in the Hugging Face Trainer: layers with a third of the parameters, taught by the whole model."""

import copy

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import Distillation, LowRank

if __name__ == "__main__":
    whole = Trainer(vision_transformer(64), arguments(), **splits())
    whole.train()

    callbacks = [
        LowRank(rank="budget:0.33", decomposition="whitened", calibration_batches=8, min_size=0),
        Distillation(teacher=copy.deepcopy(whole.model)),
    ]
    model = copy.deepcopy(whole.model)
    trainer = Trainer(model, arguments(num_train_epochs=2), callbacks=callbacks, **splits())
    trainer.train()

    sizes = [one.model.num_parameters() for one in (whole, trainer)]
    accuracies = [one.evaluate()["eval_accuracy"] for one in (whole, trainer)]
    print("{:,} -> {:,} parameters, accuracy {:.3f} -> {:.3f}".format(*sizes, *accuracies))
