"""A greedy soup in the Hugging Face Trainer: the average of those checkpoints that improve the metric.

Here it is chosen and measured on the same images. A split of its own for the choice would give an honest accuracy.
"""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import ModelSoup

if __name__ == "__main__":
    soup = ModelSoup(kind="greedy", metric="eval_accuracy")
    settings = arguments(lr_scheduler_type="constant", save_strategy="epoch", eval_strategy="epoch")
    trainer = Trainer(vision_transformer(), settings, callbacks=[soup], **splits())
    trainer.train()

    report = soup.session.receipt()["techniques"]["soup"]
    print(
        f"accuracy: best checkpoint {report['best_single']:.3f}, soup of {len(report['ingredients'])} of "
        f"{report['candidates']} checkpoints {trainer.evaluate()['eval_accuracy']:.3f}"
    )
