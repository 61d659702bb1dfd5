"""A vision transformer learns the digits 0-4 whole, then all ten in adapters on 4-bit weights, in the HF Trainer.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/lora.py
"""

import copy
import tempfile

from digits_hf import digits, train, vision_transformer

from hf_eff import Lora


def pretrained(folder):
    """Return a model that knows half of the digits."""
    few = [example for example in digits()[0] if example["labels"] < 5]
    trainer, accuracy = train(folder, vision_transformer(64), examples=few, num_train_epochs=8)
    print(f"{'digits 0-4 alone':22}accuracy {accuracy:.3f}")
    return trainer.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = pretrained(folder)
        for name, options in {
            "LoRA, float base": {"base": "none"},
            "QLoRA, nf4 base": {"base": "nf4"},
            "... and requantised": {"base": "nf4", "requantize": True},
        }.items():
            lora = Lora(rank=8, **options)
            trainer, accuracy = train(folder, copy.deepcopy(model), [lora], num_train_epochs=6)
            told = lora.session.receipt()["techniques"]["lora"]
            share = told["trained_parameters"] / (told["frozen_parameters"] + told["trained_parameters"])
            kilobytes = [told[key] / 1024 for key in ("bytes_before", "bytes_after")]
            print(
                f"{name:22}accuracy {accuracy:.3f}, {share:.0%} of parameters trained, "
                f"frozen weights {kilobytes[0]:.0f} -> {kilobytes[1]:.0f} KiB"
            )
