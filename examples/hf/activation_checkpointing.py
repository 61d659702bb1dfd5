"""Activation checkpointing in the Hugging Face Trainer: by every policy the same weights, to the bit.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/activation_checkpointing.py
"""

import tempfile

import torch
from digits_hf import train, vision_transformer

from hf_eff import ActivationCheckpointing

if __name__ == "__main__":
    weights = {}
    for policy in (None, "block", "sublayer", "sqrt", "selective"):
        callbacks = [ActivationCheckpointing(policy=policy)] if policy else []
        with tempfile.TemporaryDirectory() as folder:
            trainer, accuracy = train(folder, vision_transformer(num_hidden_layers=4), callbacks, num_train_epochs=1)
        weights[policy] = trainer.model.state_dict()
        if not policy:
            print(f"nothing    recomputed, accuracy {accuracy:.3f}")
            continue
        told = callbacks[0].session.receipt()["techniques"]["checkpointing"]
        same = all(torch.equal(value, weights[None][name]) for name, value in weights[policy].items())
        print(
            f"{policy:10} recomputed {told['modules_recomputed'] / told['recomputations']:.0f} modules at once, "
            f"{told['recomputations_per_step']:.0f} times a step; dropped {told['saved_bytes'] / 2**20:.2f} MiB; "
            f"weights {'equal' if same else 'DIFFERENT'}, accuracy {accuracy:.3f}"
        )
