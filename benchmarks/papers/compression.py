"""Deep Compression of both LeNets on MNIST (Han, Mao and Dally 2016, arXiv:1510.00149, tables 1 to 3).

As in the paper: a trained network is pruned to the paper's share of each layer's weights and trained again, its weights
are shared among few values, the values are trained, and codes and gaps are coded. One recipe does it in one second
training: pruned in the first third, shared in the last quarter. Every byte of the file counts: header, index, code
books, tables of the entropy coder, biases in fp32; against the fp32 bytes of everything.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digits28 import Batch
from mnist import Drawn, errors, lenet5, mlp, train
from replicas import Published, Runs, mean, published, reaches, spread
from torch import nn

from shared_core.tools.compression import compress, decompress

RATE, DECAY = 1e-3, 0.05
BITS, FEW_BITS = 5, 4  # the paper's codes have an entropy of 4.4 bits: our k-means uses its values more evenly


@dataclass(frozen=True)
class Layer:
    """The paper's figures of a layer: weights kept in percent, number of values, bytes in percent of fp32."""

    title: str
    kept: int
    values: int
    rate: float


@dataclass(frozen=True)
class Net:
    """How a network is trained, and what the paper says of it."""

    build: Callable[..., nn.Sequential]
    seeds: int
    batch: int
    epochs: int
    dropout: float
    largest: str
    """The layer with `FEW_BITS`."""
    layers: dict[str, Layer]
    before: float
    after: float
    ratio: int
    kilobytes: int


NETS = {
    "LeNet-300-100": Net(
        lambda seed, dropout: mlp(seed, 300, 100, dropout=dropout), 3, 128, 12, 0.2, "1",
        {
            "1": Layer("784 x 300", 8, 64, 2.32),
            "4": Layer("300 x 100", 9, 64, 3.04),
            "7": Layer("100 x 10", 26, 64, 12.70),
        },
        1.64, 1.58, 40, 27,
    ),
    "LeNet-5": Net(
        lenet5, 2, 64, 6, 0.5, "5",
        {
            "0": Layer("20 of 5 x 5", 66, 256, 67.45),
            "2": Layer("50 of 20 x 5 x 5", 12, 256, 5.28),
            "5": Layer("800 x 500", 8, 32, 2.45),
            "8": Layer("500 x 10", 19, 32, 6.13),
        },
        0.80, 0.74, 39, 44,
    ),
}  # fmt: skip


def run(net: Net, seed: int, data: tuple[Batch, Batch], quick: bool) -> dict[str, Any]:
    """Return errors in percent, before and after, and what became of each layer."""
    images, test = data
    steps = 20 if quick else net.epochs * len(images[0]) // net.batch

    def trained(model: nn.Sequential, number: int, recipe: dict[str, Any] | None = None) -> nn.Sequential:
        return train(model, Drawn(images, steps, net.batch, number), rate=RATE, decay=DECAY, recipe=recipe)

    dense = trained(net.build(seed, dropout=net.dropout), seed)
    bits_of = {net.largest: FEW_BITS}
    recipe = {
        "prune": {
            "sparsity": 0.92, "scope": "local", "end": 0.35, "max_layer_sparsity": None,
            "overrides": [f"{name}:sparsity={1 - layer.kept / 100:g}" for name, layer in net.layers.items()],
        },
        "cluster": {
            "bits": BITS, "bits_of": [f"{name}={bits}" for name, bits in bits_of.items()], "begin": 0.75, "min_size": 0,
        },
    }  # fmt: skip
    small = copy.deepcopy(dense)
    kept = 100
    for name, module in small.named_children():
        kept = net.layers[name].kept if name in net.layers else kept
        if isinstance(module, nn.Dropout):
            module.p *= (kept / 100) ** 0.5  # fewer weights overfit less (Han et al. 2015, arXiv:1506.02626)
    trained(small, 100 + seed, recipe)
    state_dict = small.state_dict()
    with tempfile.TemporaryDirectory(prefix="eff-compression-") as folder:
        file = Path(folder) / "lenet.eff"
        done = compress(state_dict, file, bits=BITS, bits_of=bits_of, min_size=0)
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
            for name in net.layers
        },
    }


def rows(title: str, net: Net, found: list[dict[str, Any]]) -> list[Published]:
    def values(key: str) -> list[float]:
        return [one[key] for one in found]

    made = [
        Published(f"{title}: error before", f"{net.before:.2f} %", f"{spread(values('dense'), 2)} %",
                  f"{net.epochs} epochs of AdamW, dropout {net.dropout:g}, not Caffe's SGD; seeds: {len(found)}"),
        Published("error of what the file holds", f"{net.after:.2f} %", f"{spread(values('small'), 2)} %",
                  f"{net.epochs} more epochs", met=reaches(values("small"), net.after, lower=True)),
        Published("file, of fp32", f"{net.ratio}x, {net.kilobytes} KB",
                  f"{spread(values('ratio'))}x, {mean(values('bytes')) / 1000:.1f} KB",
                  f"{FEW_BITS} bits in the largest layer, {BITS} in the others, an arithmetic coder; header, index and "
                  "biases counted",
                  met=reaches(values("ratio"), net.ratio)),
    ]  # fmt: skip
    for name, layer in net.layers.items():
        layers = [one["layers"][name] for one in found]
        rates = [one["rate"] for one in layers]
        made.append(
            Published(
                f"layer {layer.title}: weights kept, values, bytes of fp32",
                f"{layer.kept} %, {layer.values}, {layer.rate} %",
                f"{mean([one['kept'] for one in layers]):.0f} %, {max(one['values'] for one in layers)}, "
                f"{spread(rates, 2)} %",
                met=reaches(rates, layer.rate, lower=True),
            )
        )
    return made


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    made = []
    for title, net in NETS.items():
        found = runs.seeds(1 if quick else net.seeds, functools.partial(run, net, data=data, quick=quick), title)
        made += rows(title, net, found)
    return made


if __name__ == "__main__":
    published(measure)
