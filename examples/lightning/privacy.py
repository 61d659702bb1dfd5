"""Differential privacy in PyTorch Lightning: a classifier of handwritten digits, at three levels of privacy."""

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import DifferentialPrivacy


def main():
    torch.set_num_threads(1)
    train_loader, test_loader = digits()
    for target in (None, 8.0, 2.0, 0.5):
        private = None if target is None else DifferentialPrivacy(target_epsilon=target, delta=1e-4)
        model = Classifier(lr=5e-3)
        make_trainer(callbacks=[private] if private else []).fit(model, train_loader)
        told = private.receipt.values["techniques"]["dp"] if private else None
        how = (
            f"epsilon {told['epsilon']:.2f}, noise multiplier {told['noise_multiplier']:.2f}" if told else "not private"
        )
        print(f"{how}: test accuracy {model.accuracy(test_loader):.3f}")


if __name__ == "__main__":
    main()
