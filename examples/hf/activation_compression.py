"""A vision transformer in the Hugging Face Trainer: what backward needs, kept smaller, and what that costs.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/activation_compression.py
"""

import tempfile

from digits_hf import train

from hf_eff import ActivationCompression

if __name__ == "__main__":
    for pack in (None, "exact", "bf16", "int8"):
        callbacks = [ActivationCompression(pack=pack)] if pack else []
        with tempfile.TemporaryDirectory() as folder:
            _, accuracy = train(folder, None, callbacks, num_train_epochs=4)
        told = callbacks[0].session.receipt()["techniques"]["activations"] if pack else {"share_saved": 0.0}
        print(f"{pack or 'plain':8}activations saved {told['share_saved']:.0%}, accuracy {accuracy:.3f}")
