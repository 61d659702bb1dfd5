"""Primary weights in the Hugging Face Trainer: a bf16 model keeps small updates that rounding would lose."""

import torch
from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import PrimaryWeights

if __name__ == "__main__":
    accuracies = []
    for callbacks in ([], [PrimaryWeights(kind="fp32_copy")]):
        model = vision_transformer().to(torch.bfloat16)
        trainer = Trainer(model, arguments(learning_rate=1e-4), callbacks=callbacks, **splits())
        trainer.train()
        accuracies.append(trainer.evaluate()["eval_accuracy"])
    print(f"accuracy in bf16: {accuracies[0]:.3f} alone, {accuracies[1]:.3f} with a float32 copy of the weights")
