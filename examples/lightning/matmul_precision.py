"""Matmul precision in Lightning: float32 products in TF32 or bfloat16, where the device has them."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import MatmulPrecision

if __name__ == "__main__":
    train, test = digits()
    model = Classifier()
    precision = MatmulPrecision(precision="high")
    pl.Trainer(max_epochs=5, callbacks=[precision], **QUIET).fit(model, train)

    report = precision.receipt["techniques"]["matmul"]
    print(f"products in {report['products_in']}, accuracy {model.accuracy(test):.3f}")
