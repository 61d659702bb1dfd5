"""A vision transformer with bf16 weights and a small learning rate in the Hugging Face Trainer: what rounding loses.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/primary_weights.py
"""

import tempfile

import torch
from digits_hf import make_trainer, vision_transformer

from hf_eff import PrimaryWeights


def accuracy_of(folder, dtype, callbacks=()):
    """Return the accuracy on the test set of a model that was loaded in this format."""
    trainer = make_trainer(folder, vision_transformer().to(dtype), callbacks, num_train_epochs=8)
    trainer.args.learning_rate = 1e-4
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{str(dtype)[6:]:30}accuracy {accuracy_of(folder, dtype):.3f}")
        for kind in ("fp32_copy", "stochastic_rounding"):
            accuracy = accuracy_of(folder, torch.bfloat16, [PrimaryWeights(kind=kind)])
            print(f"{'bfloat16, ' + kind:30}accuracy {accuracy:.3f}")
