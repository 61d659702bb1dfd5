"""Quantization-aware training in the Hugging Face Trainer: weights of two bits, inputs of eight."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import QuantizationAwareTraining

if __name__ == "__main__":
    qat = QuantizationAwareTraining(scheme="int8", weight_bits=2, begin=0.3)
    trainer = Trainer(vision_transformer(), arguments(num_train_epochs=12), callbacks=[qat], **splits())
    trainer.train()

    values = trainer.model.classifier.weight[0].unique().numel()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"{values} different weights for each output, accuracy {accuracy:.3f}")
