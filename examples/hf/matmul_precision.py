"""The precision of float32 products in the Hugging Face Trainer: what was asked for, and what this machine did.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/matmul_precision.py
"""

import tempfile

from digits_hf import train

from hf_eff import MatmulPrecision

if __name__ == "__main__":
    for precision in ("highest", "high", "medium"):
        with tempfile.TemporaryDirectory() as folder:
            callback = MatmulPrecision(precision=precision)
            _, accuracy = train(folder, None, [callback], num_train_epochs=3)
        told = callback.session.receipt()["techniques"]["matmul"]
        state = "active" if told["active"] else "inactive"
        print(f"{precision:8} {state:9} products in {told['products_in']}, accuracy {accuracy:.3f}")
