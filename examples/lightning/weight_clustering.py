"""Train a digits classifier whose weights share 32 values a layer, and store it in a small file."""

import tempfile
from pathlib import Path

import torch
from digits_lightning import Classifier, digits, make_trainer

from lightning_eff import Pruning, WeightClustering
from shared_core.tools.compression import compress, decompress

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def main() -> None:
    train, test = digits()
    for name, callbacks in (
        ("dense", []),
        ("shared", [WeightClustering(bits=5, begin=0.6)]),
        ("pruned, shared", [Pruning(sparsity=0.8, end=0.5), WeightClustering(bits=5, begin=0.6)]),
    ):
        model = Classifier()
        make_trainer(callbacks=callbacks).fit(model, train)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.eff")
            compress(model.state_dict(), file, bits_of={} if callbacks else {"*": None})
            restored = Classifier()
            restored.load_state_dict(decompress(file))
            size = file.stat().st_size
        accuracies = f"accuracy {model.accuracy(test):.3f}, restored {restored.accuracy(test):.3f}"
        print(f"{name:16}{accuracies}, file {size:6,} bytes")


if __name__ == "__main__":
    main()
