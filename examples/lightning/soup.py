"""A greedy soup in Lightning: the average of those checkpoints of a run that improve the validation accuracy."""

import tempfile

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, random_split

from efftrain.lightning import ModelSoup

if __name__ == "__main__":
    train, others = digits(900)
    validate, test = (DataLoader(half, batch_size=450) for half in random_split(others.dataset, [0.5, 0.5]))
    model = Classifier(lr=2e-2)
    soup = ModelSoup(kind="greedy", metric="val_acc")
    with tempfile.TemporaryDirectory() as folder:
        saving = ModelCheckpoint(folder, monitor="val_acc", mode="max", save_top_k=-1)
        options = QUIET | {"enable_checkpointing": True}
        pl.Trainer(max_epochs=10, callbacks=[soup, saving], **options).fit(model, train, validate)

    report = soup.receipt["techniques"]["soup"]
    print(
        f"soup of {len(report['ingredients'])} of {report['candidates']} checkpoints, "
        f"accuracy {model.accuracy(test):.3f} on images that did not choose it"
    )
