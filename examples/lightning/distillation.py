"""Distillation in Lightning: the teacher learned from good labels, two of five labels of the student are wrong."""

import pytorch_lightning as pl
import torch
from digits_lightning import QUIET, Classifier, digits
from torch.utils.data import DataLoader, TensorDataset

from efftrain.lightning import Distillation


def with_wrong_labels(loader: DataLoader, share: float = 0.4) -> DataLoader:
    x, y = loader.dataset.tensors
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(y), generator=generator) < share
    y = torch.where(wrong, torch.randint(10, y.shape, generator=generator), y)
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)


if __name__ == "__main__":
    train, test = digits()
    teacher = Classifier(width=256)
    pl.Trainer(max_epochs=10, **QUIET).fit(teacher, train)

    accuracies = [teacher.accuracy(test)]
    for callbacks in ([], [Distillation(teacher=teacher, temperature=2.0, alpha=0.2)]):
        student = Classifier(width=64)
        pl.Trainer(max_epochs=10, callbacks=callbacks, **QUIET).fit(student, with_wrong_labels(train))
        accuracies.append(student.accuracy(test))
    print("accuracy: teacher {:.3f}, student alone {:.3f}, student with the teacher {:.3f}".format(*accuracies))
