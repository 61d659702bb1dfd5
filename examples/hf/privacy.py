"""Differential privacy in the Hugging Face Trainer: a ViT on handwritten digits, at three levels of privacy."""

import json
import tempfile
from pathlib import Path

from digits_hf import train

from hf_eff import DifferentialPrivacy


def main():
    settings = {"num_train_epochs": 6, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    with tempfile.TemporaryDirectory() as folder:
        print(f"not private    test accuracy {train(folder, **settings)[1]:.3f}")
        for target in (8.0, 2.0):
            private = DifferentialPrivacy(target_epsilon=target, delta=1e-4)
            accuracy = train(folder, callbacks=[private], **settings)[1]
            told = json.loads((Path(folder) / "eff_receipt.json").read_text())["techniques"]["dp"]
            print(
                f"epsilon {told['epsilon']:.2f}, delta {told['delta']:g} ({told['accountant']}, {told['sampling']} "
                f"sampling, noise multiplier {told['noise_multiplier']:.2f})    test accuracy {accuracy:.3f}"
            )


if __name__ == "__main__":
    main()
