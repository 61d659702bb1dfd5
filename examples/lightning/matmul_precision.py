"""Train a digits classifier with each precision of float32 products: what was asked for, and what this machine did."""

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import MatmulPrecision

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    train, test = digits()
    for precision in ("highest", "high", "medium"):
        model, callback = Classifier(), MatmulPrecision(precision=precision)
        make_trainer(max_epochs=5, callbacks=[callback]).fit(model, train)
        told = callback.session.receipt()["techniques"]["matmul"]
        state = "active" if told["active"] else "inactive"
        print(f"{precision:8} {state:9} products in {told['products_in']}, accuracy {model.accuracy(test):.3f}")


if __name__ == "__main__":
    main()
