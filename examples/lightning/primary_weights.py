"""Train a digits classifier whose weights are bf16, with and without updates in float32."""

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import PrimaryWeights

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    train, test = digits()
    for name, precision, callbacks in (
        ("float32", "32-true", []),
        ("bf16", "bf16-true", []),
        ("bf16, fp32_copy", "bf16-true", [PrimaryWeights(kind="fp32_copy")]),
        ("bf16, stochastic_rounding", "bf16-true", [PrimaryWeights(kind="stochastic_rounding")]),
    ):
        model = Classifier(lr=1e-4)
        make_trainer(max_epochs=8, precision=precision, callbacks=callbacks).fit(model, train)
        print(f"{name:28}accuracy {model.float().accuracy(test):.3f}")


if __name__ == "__main__":
    main()
