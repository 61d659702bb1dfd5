"""FP8 training in the Hugging Face Trainer, one run a recipe, against training in float32.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/fp8.py
Without a GPU that multiplies FP8 the same numbers are emulated: this shows what FP8 does to learning, not its speed.
"""

import tempfile

from digits_hf import train

from hf_eff import Fp8

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _, accuracy = train(folder + "/float32", num_train_epochs=6)
        print(f"{'float32':12}accuracy {accuracy:.3f}")
        for recipe in ("delayed", "rowwise"):
            fp8 = Fp8(recipe=recipe)
            _, accuracy = train(folder + "/" + recipe, None, [fp8], num_train_epochs=6)
            told = fp8.session.receipt()["techniques"]["fp8"]
            print(
                f"{recipe:12}accuracy {accuracy:.3f}, {told['layers']} layers in FP8, {len(told['left_out'])} left out"
            )
