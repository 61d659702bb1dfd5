"""Prune a digits classifier to 90 % zeros while it trains, with one callback in the Trainer."""

from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import Pruning


def main() -> None:
    train, test = digits()
    dense, pruned = Classifier(), Classifier()
    make_trainer().fit(dense, train)
    make_trainer(callbacks=[Pruning(sparsity=0.9, begin=0.2, end=0.7, every=20, skip=["last"])]).fit(pruned, train)

    print(f"{'':8}{'accuracy':>10}{'zeros':>10}")
    for name, model in (("dense", dense), ("pruned", pruned)):
        weights = model.net[1].weight
        print(f"{name:8}{model.accuracy(test):10.3f}{(weights == 0).float().mean():10.1%}")


if __name__ == "__main__":
    main()
