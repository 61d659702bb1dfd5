"""A vision transformer with a third of the parameters in its layers, taught by the whole one; Hugging Face Trainer.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/low_rank.py
"""

import copy
import tempfile

from digits_hf import digits, train, vision_transformer

from hf_eff import Distillation, LowRank
from shared_core.low_rank import load


def size(model):
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        whole, accuracy = train(folder, vision_transformer(64))
        print(f"{'whole':32}accuracy {accuracy:.3f}, {size(whole.model):,} parameters")
        options = {"rank": "budget:0.33", "decomposition": "whitened", "calibration_batches": 8, "min_size": 0}
        for name, more in (("a third, fine-tuned", []), ("the same, taught by the whole", [whole.model])):
            callbacks = [LowRank(**options), *(Distillation(teacher=copy.deepcopy(model)) for model in more)]
            small, accuracy = train(folder, copy.deepcopy(whole.model), callbacks, num_train_epochs=2)
            print(f"{name:32}accuracy {accuracy:.3f}, {size(small.model):,} parameters")

        small.save_model(folder)
        fresh = load(vision_transformer(64), folder).eval()
        pixels = digits()[1][0]["pixel_values"][None]
        gap = (fresh(pixels).logits - small.model.eval()(pixels).logits).abs().max()
        print(f"{'saved and loaded':32}largest difference {float(gap):.1f}")
