"""Gradients sent in 16 bits, or as products of low rank, between two processes of a Lightning Trainer.

Run: python examples/lightning/gradient_compression.py
Trainer(devices=2, strategy="eff_ddp_bf16") starts both processes.
"""

from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import GradientCompression


def main() -> None:
    train, test = digits()
    lines = []
    for options in (None, {"hook": "bf16"}, {"hook": "powersgd", "rank": 2}):
        callbacks = [] if options is None else [GradientCompression(**options)]
        model = Classifier()
        trainer = make_trainer(callbacks=callbacks, devices=2, strategy="eff_ddp", max_epochs=5)
        trainer.fit(model, train)
        lines.append(f"{'whole' if options is None else options['hook']:10}accuracy {model.accuracy(test):.3f}")
        if callbacks:
            report = callbacks[0].receipt["techniques"]["comm"]
            lines[-1] += f", {report['ratio']:.1f} times fewer bytes a step"
    if trainer.is_global_zero:
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
