"""Gradients sent in 16 bits, or as products of low rank, between two processes of a Lightning Trainer.

Run: python examples/gradient_compression_lightning.py, which starts both processes; in a script of yours Lightning
starts them itself: Trainer(devices=2, strategy="eff_ddp_bf16")
"""

import os

from digits_lightning import Classifier, digits, make_trainer
from two_processes import in_two_processes

from lightning_eff import GradientCompression


def main() -> None:
    train, test = digits()
    lines = []
    for options in (None, {"hook": "bf16"}, {"hook": "powersgd", "rank": 2}):
        callbacks = [] if options is None else [GradientCompression(**options)]
        model = Classifier()
        make_trainer(callbacks=callbacks, devices=2, strategy="eff_ddp", max_epochs=5).fit(model, train)
        lines.append(f"{'whole' if options is None else options['hook']:10}accuracy {model.accuracy(test):.3f}")
        if callbacks:
            report = callbacks[0].receipt["techniques"]["comm"]
            lines[-1] += f", {report['ratio']:.1f} times fewer bytes a step"
    if os.environ["RANK"] == "0":
        print(*lines, sep="\n")


if __name__ == "__main__":
    in_two_processes(main)
