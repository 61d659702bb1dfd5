"""Pruning in the Hugging Face Trainer: one callback, and four of five weights of the linear layers are zero.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/pruning.py
"""

import tempfile

import torch
from digits_hf import train

from hf_eff import Pruning

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _, dense = train(folder + "/dense", num_train_epochs=12)
        pruning = Pruning(sparsity=0.8, begin=0.1, end=0.6, every=5)
        trainer, pruned = train(folder + "/pruned", None, [pruning], num_train_epochs=12)
        layers = [module for module in trainer.model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
        zeros = sum(int((layer.weight == 0).sum()) for layer in layers)
        numel = sum(layer.weight.numel() for layer in layers)
        print(f"dense:  accuracy {dense:.3f}")
        print(f"pruned: accuracy {pruned:.3f}, {zeros:,} of {numel:,} weights are zero")
