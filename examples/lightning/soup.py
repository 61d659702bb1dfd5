"""Average the checkpoints of one run greedily, by the Trainer's own validation accuracy."""

import tempfile

from digits_lightning import Classifier, digits, make_trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_eff import ModelSoup


def main() -> None:
    train, test = digits(900)
    _, validate = digits(1500)
    with tempfile.TemporaryDirectory() as folder:
        saving = ModelCheckpoint(folder, monitor="val_acc", mode="max", save_top_k=-1)
        soup = ModelSoup(kind="greedy", metric="val_acc")
        plain, model = Classifier(lr=2e-2), Classifier(lr=2e-2)
        make_trainer().fit(plain, train)
        make_trainer(callbacks=[soup, saving], enable_checkpointing=True).fit(model, train, validate)
    told = soup.receipt["techniques"]["soup"]

    print(f"{'':24}{'accuracy':>10}")
    print(f"{'last checkpoint':24}{plain.accuracy(test):10.3f}")
    print(f"{'soup of ' + str(len(told['ingredients'])) + ' checkpoints':24}{model.accuracy(test):10.3f}")


if __name__ == "__main__":
    main()
