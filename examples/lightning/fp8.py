"""Train a digits classifier with FP8 products, forward and backward, against float32.

Without a GPU that multiplies FP8 the same numbers are emulated: this shows what FP8 does to learning, not its speed.
"""

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import Fp8

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    train, test = digits()
    plain = Classifier()
    make_trainer(max_epochs=5).fit(plain, train)
    print(f"{'float32':12}accuracy {plain.accuracy(test):.3f}")
    for recipe in ("delayed", "rowwise", "mx"):
        model = Classifier()
        # the only layer with sizes that are multiples of 16 is the first one, which has to be asked for
        fp8 = Fp8(recipe=recipe, include=["first"])
        make_trainer(max_epochs=5, callbacks=[fp8]).fit(model, train)
        (layer,) = fp8.session.receipt()["techniques"]["fp8"]["per_layer"]
        products = sum(layer["emulated"].values()) + sum(layer["scaled_mm"].values())
        print(f"{recipe:12}accuracy {model.accuracy(test):.3f} after {products} FP8 products")


if __name__ == "__main__":
    main()
