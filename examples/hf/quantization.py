"""Quantization-aware training in the Hugging Face Trainer, against rounding the weights after training.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/quantization.py
"""

import tempfile

import torch
from digits_hf import train

from hf_eff import QuantizationAwareTraining

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        float_trainer, before = train(folder + "/float", num_train_epochs=12)
        with torch.no_grad():  # what rounding to two bits does to a model that was not trained for it
            for module in float_trainer.model.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                    scale = module.weight.flatten(1).abs().amax(1).view(-1, *[1] * (module.weight.dim() - 1))
                    module.weight.copy_((module.weight / scale).round() * scale)
        rounded = float_trainer.evaluate()["eval_accuracy"]

        qat = QuantizationAwareTraining(scheme="int8", weight_bits=2, begin=0.3)
        trained, after = train(folder + "/qat", None, [qat], num_train_epochs=12)
        values = trained.model.classifier.weight[0].unique().numel()
        print(f"float weights:                accuracy {before:.3f}")
        print(f"rounded to 2 bits afterwards: accuracy {rounded:.3f}")
        print(f"trained for 2 bits:           accuracy {after:.3f}, {values} different values in a row of weights")
