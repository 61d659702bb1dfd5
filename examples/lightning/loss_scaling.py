"""Train a digits classifier in fp16 whose loss is so small that its gradients underflow without a scale."""

from typing import Any

from digits_lightning import Classifier, digits, make_trainer
from torch import Tensor

from lightning_eff import LossScalingPrecision

TINY = 1e-6


class TinyLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # As in a multi-task loss with a small weight: its gradients lie below fp16's smallest number.
        return super().training_step(batch, batch_idx) * TINY


def main() -> None:
    train, test = digits()
    print(f"{'':18}{'accuracy':>10}{'skipped steps':>15}{'last scale':>12}")
    for name, plugin in (
        ("scale 1", LossScalingPrecision(kind="static", init_scale=1.0)),
        ("dynamic scale", LossScalingPrecision(init_scale=2.0**40)),
    ):
        model = TinyLoss()
        make_trainer(plugins=plugin).fit(model, train)
        scaler = plugin.scaler
        print(f"{name:18}{model.accuracy(test):10.3f}{scaler.skipped_steps:15}{scaler.get_scale():12.3g}")


if __name__ == "__main__":
    main()
