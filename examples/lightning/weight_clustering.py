"""Pruning and shared weights in Lightning: a file of a few kilobytes."""

import tempfile
from pathlib import Path

import pytorch_lightning as pl
from digits_lightning import QUIET, Classifier, digits

from efftrain.lightning import Pruning, WeightClustering
from shared_core.tools.compression import compress, decompress

if __name__ == "__main__":
    train, test = digits()
    model = Classifier()
    callbacks = [Pruning(sparsity=0.8, end=0.5), WeightClustering(bits=5, begin=0.6)]
    pl.Trainer(max_epochs=10, callbacks=callbacks, **QUIET).fit(model, train)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.eff")
        compress(model.state_dict(), file)
        model.load_state_dict(decompress(file))
        packed = file.stat().st_size / 1000
    whole = 4 * sum(parameter.numel() for parameter in model.parameters()) / 1000
    print(f"{whole:.0f} kB of weights -> a file of {packed:.0f} kB, accuracy {model.accuracy(test):.3f}")
