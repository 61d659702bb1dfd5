"""Pruning in the Hugging Face Trainer: four of five weights of the linear layers become zero."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import Pruning

if __name__ == "__main__":
    pruning = Pruning(sparsity=0.8, begin=0.1, end=0.6, every=5)
    trainer = Trainer(vision_transformer(), arguments(num_train_epochs=12), callbacks=[pruning], **splits())
    trainer.train()

    report = pruning.session.receipt()["techniques"]["prune"]
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"{report['pruned']:,} of {report['numel']:,} weights are zero, accuracy {accuracy:.3f}")
