"""Activation checkpointing in the Hugging Face Trainer: less memory, and the same weights to the last bit."""

import torch
from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import ActivationCheckpointing

if __name__ == "__main__":
    plain = Trainer(vision_transformer(num_hidden_layers=4), arguments(num_train_epochs=1), **splits())
    plain.train()

    checkpointing = ActivationCheckpointing(policy="block")
    model = vision_transformer(num_hidden_layers=4)
    trainer = Trainer(model, arguments(num_train_epochs=1), callbacks=[checkpointing], **splits())
    trainer.train()

    report = checkpointing.session.receipt()["techniques"]["checkpointing"]
    pairs = zip(plain.model.parameters(), trainer.model.parameters(), strict=True)
    same = "equal" if all(torch.equal(one, other) for one, other in pairs) else "DIFFERENT"
    print(f"activations: {report['saved_bytes'] / 2**20:.2f} MiB less for each batch, weights {same}")
