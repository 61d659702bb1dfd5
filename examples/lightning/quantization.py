"""Train a digits classifier for 2-bit weights, against rounding the weights of a model that never knew."""

import copy

from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import QuantizationAwareTraining

BITS = 2


def rounded(model: Classifier) -> Classifier:
    model = copy.deepcopy(model)
    for layer in (model.net[1], model.net[3]):
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / (2 ** (BITS - 1) - 1)
        layer.weight.data = (layer.weight.data / scale).round() * scale
    return model


def main() -> None:
    train, test = digits()
    float_model, aware = Classifier(), Classifier()
    make_trainer().fit(float_model, train)
    qat = QuantizationAwareTraining(scheme="int8", weight_bits=BITS, begin=0.2)
    make_trainer(callbacks=[qat]).fit(aware, train)

    print(f"{'':28}{'accuracy':>10}{'values a row':>14}")
    rows = {"float": float_model, f"rounded to {BITS} bits": rounded(float_model), f"trained for {BITS} bits": aware}
    for name, model in rows.items():
        print(f"{name:28}{model.accuracy(test):10.3f}{len(model.net[1].weight[0].unique()):14}")


if __name__ == "__main__":
    main()
