"""Matmul precision in the Hugging Face Trainer: float32 products in TF32 or bfloat16, where the device has them."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import MatmulPrecision

if __name__ == "__main__":
    precision = MatmulPrecision(precision="high")
    trainer = Trainer(vision_transformer(), arguments(num_train_epochs=3), callbacks=[precision], **splits())
    trainer.train()

    report = precision.session.receipt()["techniques"]["matmul"]
    print(f"products in {report['products_in']}, accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
