"""Running averages of a vision transformer's weights in the Hugging Face Trainer, at a constant learning rate.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/average.py
"""

import tempfile

from digits_hf import train

from hf_eff import WeightAverage

AVERAGES = {
    "the last weights": [],
    "exponential": [WeightAverage(kind="ema", decay=0.95)],
    "of the last half": [WeightAverage(kind="swa", begin=0.5)],
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, callbacks in AVERAGES.items():
            _, accuracy = train(folder, None, callbacks, lr_scheduler_type="constant", num_train_epochs=6)
            updates = [callback.session.receipt()["techniques"]["average"]["updates"] for callback in callbacks]
            print(f"{name:24} {updates[0] if updates else 1:4} weights, accuracy {accuracy:.3f}")
