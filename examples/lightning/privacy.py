"""Differential privacy in Lightning: a model that reveals little about any single image."""

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import DifferentialPrivacy

if __name__ == "__main__":
    train, test = digits()
    model = Classifier(lr=5e-3)
    privacy = DifferentialPrivacy(target_epsilon=8.0, delta=1e-4)
    pl.Trainer(max_epochs=10, callbacks=[privacy], **QUIET).fit(model, train)

    report = privacy.receipt["techniques"]["dp"]
    print(f"epsilon {report['epsilon']:.2f} at delta {report['delta']:g}, accuracy {model.accuracy(test):.3f}")
