"""Distil a digits classifier that saw good labels into a smaller one whose labels are wrong in two of five cases."""

import torch
from digits_lightning import Classifier, digits, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import Distillation


def with_wrong_labels(loader: DataLoader, share: float = 0.4) -> DataLoader:
    x, y = loader.dataset.tensors
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(y), generator=generator) < share
    y = torch.where(wrong, torch.randint(10, y.shape, generator=generator), y)
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)


def main() -> None:
    train, test = digits()
    noisy = with_wrong_labels(train)
    teacher, alone, distilled = Classifier(width=256), Classifier(width=64), Classifier(width=64)
    make_trainer().fit(teacher, train)
    make_trainer().fit(alone, noisy)
    make_trainer(callbacks=[Distillation(teacher=teacher, temperature=2.0, alpha=0.2)]).fit(distilled, noisy)

    print(f"{'':20}{'parameters':>12}{'accuracy':>10}")
    for name, model in (("teacher", teacher), ("student alone", alone), ("student distilled", distilled)):
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:20}{size:12,}{model.accuracy(test):10.3f}")


if __name__ == "__main__":
    main()
