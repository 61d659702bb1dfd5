"""A running average of a model's weights in the Hugging Face Trainer, at a constant learning rate."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import WeightAverage

if __name__ == "__main__":
    accuracies = []
    for callbacks in ([], [WeightAverage(kind="ema", decay=0.95)]):
        settings = arguments(num_train_epochs=6, lr_scheduler_type="constant")
        trainer = Trainer(vision_transformer(), settings, callbacks=callbacks, **splits())
        trainer.train()
        accuracies.append(trainer.evaluate()["eval_accuracy"])
    print(f"accuracy: last weights {accuracies[0]:.3f}, their exponential average {accuracies[1]:.3f}")
