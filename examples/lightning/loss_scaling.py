"""Loss scaling in Lightning: fp16 training with a loss so small that its gradients would underflow."""

from typing import Any

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits
from torch import Tensor

from efftrain.lightning import LossScalingPrecision


class TinyLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 1e-6  # as a small weight in a multi-task loss


if __name__ == "__main__":
    train, test = digits()
    accuracies = []
    for plugin in (LossScalingPrecision(kind="static", init_scale=1.0), LossScalingPrecision(init_scale=2.0**40)):
        model = TinyLoss()
        pl.Trainer(max_epochs=10, plugins=plugin, **QUIET).fit(model, train)
        accuracies.append(model.accuracy(test))
    scaler = plugin.scaler
    print(
        f"accuracy: {accuracies[0]:.3f} without a scale, {accuracies[1]:.3f} with a scale of {scaler.get_scale():.3g} "
        f"found in {scaler.skipped_steps} skipped steps"
    )
