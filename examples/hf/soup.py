"""A greedy soup in the Hugging Face Trainer: the average of the run's own checkpoints, chosen by its own evaluation.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/soup.py
"""

import tempfile

from digits_hf import train

from hf_eff import ModelSoup

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        settings = {"lr_scheduler_type": "constant", "save_strategy": "epoch", "eval_strategy": "epoch"}
        _, last = train(folder + "/last", **settings)
        soup = ModelSoup(kind="greedy", metric="eval_accuracy")
        _, souped = train(folder + "/soup", None, [soup], **settings)
        report = soup.session.receipt()["techniques"]["soup"]
        # Chosen and measured on the same images here; a split that was not used for choosing tells the truth.
        print(f"last checkpoint:        accuracy {last:.3f}")
        print(f"best single checkpoint: accuracy {report['best_single']:.3f}")
        print(f"soup of {len(report['ingredients'])} of {report['candidates']}:           accuracy {souped:.3f}")
