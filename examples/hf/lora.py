"""A vision transformer learns the digits 0-4 whole, then all ten in adapters, which stock PEFT loads.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/lora.py
"""

import copy
import tempfile
from pathlib import Path

from digits_hf import digits, train, vision_transformer
from peft import PeftModel

from hf_eff import Lora


def pretrained(folder):
    """Return a model that knows half of the digits."""
    few = [example for example in digits()[0] if example["labels"] < 5]
    trainer, accuracy = train(folder, vision_transformer(64), examples=few, num_train_epochs=8)
    print(f"{'digits 0-4 alone':16}accuracy {accuracy:.3f}")
    return trainer.model


def adapted(folder, model, base):
    """Train adapters on a base and save them."""
    lora = Lora(rank=8, base=base)
    trainer, accuracy = train(folder, copy.deepcopy(model), [lora], num_train_epochs=6)
    trainer.save_model(folder)
    told = lora.session.receipt()["techniques"]["lora"]
    share = told["trained_parameters"] / (told["frozen_parameters"] + told["trained_parameters"])
    size = (Path(folder) / "adapter_model.safetensors").stat().st_size / 1024
    print(
        f"{base + ' base':16}accuracy {accuracy:.3f}, {share:.0%} of parameters trained, "
        f"frozen weights {told['bytes_after'] / 1024:.0f} KiB, adapters {size:.0f} KiB"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = pretrained(folder)
        adapted(f"{folder}/nf4", model, "nf4")
        adapted(f"{folder}/none", model, "none")
        loaded = PeftModel.from_pretrained(model, f"{folder}/none")
        print(f"PEFT loads {len(loaded.peft_config['default'].target_modules)} kinds of layers by name")
