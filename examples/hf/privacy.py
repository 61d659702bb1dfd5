"""Differential privacy in the Hugging Face Trainer: a model that reveals little about any single image."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import DifferentialPrivacy

if __name__ == "__main__":
    privacy = DifferentialPrivacy(target_epsilon=8.0, delta=1e-4)
    settings = arguments(num_train_epochs=6, max_grad_norm=0.0, gradient_accumulation_steps=2)  # dp clips by itself
    trainer = Trainer(vision_transformer(), settings, callbacks=[privacy], **splits())
    trainer.train()

    report = privacy.session.receipt()["techniques"]["dp"]
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"epsilon {report['epsilon']:.2f} at delta {report['delta']:g}, accuracy {accuracy:.3f}")
