"""Gradient compression in the Hugging Face Trainer: two processes exchange products of low rank.

Run: torchrun --nproc_per_node=2 examples/hf/gradient_compression.py
"""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import GradientCompression

if __name__ == "__main__":
    compression = GradientCompression(hook="powersgd", rank=2)
    trainer = Trainer(vision_transformer(), arguments(), callbacks=[compression], **splits())
    trainer.train()

    report = compression.session.receipt()["techniques"]["comm"]
    accuracy = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"gradients: {report['ratio']:.1f} times fewer bytes, accuracy {accuracy:.3f}")
