"""A digits classifier learns 0-4 whole, then all ten digits in adapters, on float and on quantized weights."""

import copy

import torch
from digits_lightning import Classifier, digits, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import Lora

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    train, test = digits()
    x, y = train.dataset.tensors
    few = DataLoader(TensorDataset(x[y < 5], y[y < 5]), batch_size=32, shuffle=True)
    model = Classifier()
    make_trainer(max_epochs=10).fit(model, few)
    print(f"{'digits 0-4 alone':20}accuracy {model.accuracy(test):.3f}")
    for base in ("none", "int8", "nf4", "fp4"):
        tuned = copy.deepcopy(model)
        lora = Lora(rank=8, base=base)
        make_trainer(max_epochs=8, callbacks=[lora]).fit(tuned, train)
        told = lora.session.receipt()["techniques"]["lora"]
        print(
            f"{base + ' base':20}accuracy {tuned.accuracy(test):.3f}, "
            f"frozen weights {told['bytes_before']} -> {told['bytes_after']} bytes"
        )


if __name__ == "__main__":
    main()
