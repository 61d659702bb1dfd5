"""Gradient compression in Lightning: two processes exchange products of low rank.

Run: python examples/lightning/gradient_compression.py; the Trainer starts the second process itself.
"""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import GradientCompression

if __name__ == "__main__":
    train, test = digits()
    model = Classifier()
    compression = GradientCompression(hook="powersgd", rank=2)
    trainer = pl.Trainer(max_epochs=5, devices=2, strategy="eff_ddp", callbacks=[compression], **QUIET)
    trainer.fit(model, train)

    report = compression.receipt["techniques"]["comm"]
    if trainer.is_global_zero:
        print(f"gradients: {report['ratio']:.1f} times fewer bytes, accuracy {model.accuracy(test):.3f}")
