"""Deep Compression of LeNet-300-100 on MNIST (Han, Mao and Dally 2016, arXiv:1510.00149, tables 1 and 2).

As in the paper: a trained network is pruned to the paper's share of each layer's weights and trained again, its weights
are shared among few values, the values are trained, and codes and gaps are coded. One recipe does it in one second
training: pruned in the first third, shared in the last quarter. Every byte of the file counts: header, index, code
books, tables of the entropy coder, biases in fp32; against the fp32 bytes of everything.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from digits28 import Batch
from mnist import Drawn, errors, mlp, train
from replicas import Published, Runs, mean, published, reaches, spread

from shared_core.tools.compression import compress, decompress

SEEDS, BATCH, EPOCHS, RATE, DECAY, DROPOUT = 3, 128, 12, 1e-3, 0.05, 0.2
BITS, FIRST_BITS = 5, 4  # 6 in the paper, whose codes have an entropy of 4.4: our k-means uses its values more evenly
# name, kept in %, rate of the file in % of fp32, as in table 2
LAYERS = (("1", 8, 2.32), ("4", 9, 3.04), ("7", 26, 12.70))


def run(seed: int, data: tuple[Batch, Batch], quick: bool) -> dict[str, Any]:
    """Return errors in per cent, before and after, and what became of each layer."""
    images, test = data
    steps = 20 if quick else EPOCHS * len(images[0]) // BATCH

    def trained(model: torch.nn.Sequential, number: int, recipe: dict[str, Any] | None = None) -> torch.nn.Sequential:
        return train(model, Drawn(images, steps, BATCH, number), rate=RATE, decay=DECAY, recipe=recipe)

    dense = trained(mlp(seed, 300, 100, dropout=DROPOUT), seed)
    recipe = {
        "prune": {
            "sparsity": 0.92, "scope": "local", "end": 0.35, "max_layer_sparsity": None,
            "overrides": [f"{name}:sparsity={1 - kept / 100:g}" for name, kept, _ in LAYERS],
        },
        "cluster": {"bits": BITS, "bits_of": [f"1={FIRST_BITS}"], "begin": 0.75, "min_size": 0},
    }  # fmt: skip
    small = copy.deepcopy(dense)
    dropouts = [module for module in small if isinstance(module, torch.nn.Dropout)]
    for module, (_, kept, _) in zip(dropouts, LAYERS, strict=False):
        module.p = DROPOUT * (kept / 100) ** 0.5  # fewer weights overfit less (Han et al. 2015, arXiv:1506.02626)
    trained(small, 100 + seed, recipe)
    state_dict = small.state_dict()
    with tempfile.TemporaryDirectory(prefix="eff-compression-") as folder:
        file = Path(folder) / "lenet.eff"
        done = compress(state_dict, file, bits=BITS, bits_of={"1": FIRST_BITS}, min_size=0)
        restored = copy.deepcopy(small)
        restored.load_state_dict(decompress(file))
        size = file.stat().st_size
    of = {tensor.name: tensor for tensor in done.tensors}
    share = 100 / len(test[0])
    return {
        "dense": share * errors(dense, test),
        "small": share * errors(restored, test),
        "bytes": size,
        "ratio": sum(4 * tensor.numel() for tensor in state_dict.values()) / size,
        "layers": {
            name: {
                "kept": 100 * (state_dict[f"{name}.weight"] != 0).float().mean().item(),
                "values": of[f"{name}.weight"].clusters,
                "rate": 100 * of[f"{name}.weight"].stored_bytes / of[f"{name}.weight"].original_bytes,
            }
            for name, *_ in LAYERS
        },
    }


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    found = [runs.of(f"seed {seed}", lambda seed=seed: run(seed, data, quick)) for seed in range(1 if quick else SEEDS)]

    def values(key: str) -> list[float]:
        return [one[key] for one in found]

    rows = [
        Published("error before", "1.64 %", f"{spread(values('dense'), 2)} %",
                  "AdamW and dropout 0.2, not Caffe's SGD"),
        Published("error of what the file holds", "1.58 %", f"{spread(values('small'), 2)} %",
                  met=reaches(values("small"), 1.58, lower=True)),
        Published("file, of fp32", "40x, 27 KB", f"{spread(values('ratio'))}x, {mean(values('bytes')) / 1000:.1f} KB",
                  "4 bits in the first layer, 5 in the others, an arithmetic coder; header, index and biases counted",
                  met=reaches(values("ratio"), 40)),
    ]  # fmt: skip
    for (name, kept, rate), title in zip(LAYERS, ("784 x 300", "300 x 100", "100 x 10"), strict=True):
        layers = [one["layers"][name] for one in found]
        rates = [layer["rate"] for layer in layers]
        rows.append(
            Published(
                f"layer {title}: weights kept, values, bytes of fp32",
                f"{kept} %, 64, {rate} %",
                f"{mean([layer['kept'] for layer in layers]):.0f} %, {max(layer['values'] for layer in layers)}, "
                f"{spread(rates, 2)} %",
                met=reaches(rates, rate, lower=True),
            )
        )
    return rows


if __name__ == "__main__":
    published(measure)
