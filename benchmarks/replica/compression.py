"""Deep Compression of LeNet-300-100: pruned, weights shared, centroids trained, coded; the file that lies on disk.

After Han, Mao and Dally 2016 (arXiv:1510.00149, table 1), who reach 40x on MNIST. One recipe prunes a trained network
until the middle of its second training and shares its weights for the last quarter. Every byte of the file counts:
header, index, code books, tables of the entropy coder, biases in fp32; against the fp32 bytes of all parameters.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from digits28 import Batch, augment, digits, lenet
from measure import Row
from replicas import Runs, main, mean, spread
from torch import Tensor, nn

from shared_core import Recipe, Session
from shared_core.tools.compression import compress, decompress

SEEDS, STEPS, BATCH, LEARNING_RATE = 3, 2500, 64, 2e-3
AUGMENTATIONS = 6
GAP_BITS = 5  # of the paper's relative index, to say what stages before entropy coding take

# (sparsity, bits, bits of the last layer), target ratio, most points lost, prototype
SETTINGS: dict[str, tuple[tuple[float, int, int], float, float, str]] = {
    "8 % of the weights, 5 bits": ((0.918, 5, 5), 37.0, 0.3, "9.30x, 32.7x, 37.4x, 27.9 KiB; 95.06 of 95.11"),
    "6 % of the weights, 4 bits, 5 in the last layer": (
        (0.94, 4, 5), 50.0, 1.0, "12.5x, 48.0x, 53.7x, 19.4 KiB; 94.35 of 95.11",
    ),
}  # fmt: skip


def train(model: nn.Module, data: Batch, seed: int, steps: int, recipe: dict[str, Any] | None = None) -> nn.Module:
    """Train in place and return the model."""
    generator = torch.Generator().manual_seed(seed)
    session = Session(Recipe.from_dict(recipe or {}))
    session.attach(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    session.begin([optimizer], total_steps=steps, clips_gradients=False)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator)
        optimizer.zero_grad()
        session.loss(F.cross_entropy(model(augment(data[0][chosen], generator)), data[1][chosen])).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        schedule.step()
    session.finish()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, test: Batch) -> float:
    """Return accuracy in percent on the same augmented images for every model."""
    generator = torch.Generator().manual_seed(1_000)
    images = torch.cat([augment(test[0], generator) for _ in range(AUGMENTATIONS)])
    output: Tensor = model.eval()(images)
    return 100 * (output.argmax(1) == test[1].repeat(AUGMENTATIONS)).float().mean().item()


def stages(state_dict: dict[str, Tensor], bits: dict[str, int]) -> tuple[float, float]:
    """Return the bytes of gaps and fp32 values, and of gaps, codes and code books, both without entropy coding."""
    values = codes = 0.0
    for name, tensor in state_dict.items():
        if tensor.ndim < 2:
            values, codes = values + 4 * tensor.numel(), codes + 4 * tensor.numel()
            continue
        places = tensor.flatten().nonzero().flatten()
        runs = places.diff(prepend=torch.tensor([-1])) - 1
        entries = len(runs) + int((runs // (2**GAP_BITS - 1)).sum())
        values += entries * (GAP_BITS + 32) / 8
        codes += entries * (GAP_BITS + bits[name]) / 8 + 4 * 2 ** bits[name]
    return values, codes


def compressed(model: nn.Module, settings: tuple[float, int, int], test: Batch) -> dict[str, Any]:
    """Write a model's file and read it back; return what it took and how good the network in it is."""
    _, bits, last_bits = settings
    state_dict = model.state_dict()
    with tempfile.TemporaryDirectory(prefix="eff-compression-") as folder:
        file = Path(folder) / "lenet.eff"
        done = compress(state_dict, file, bits=bits, bits_of={"5": last_bits}, min_size=0)
        started = time.perf_counter()
        back = decompress(file)
        seconds = time.perf_counter() - started
        size = file.stat().st_size
    other = copy.deepcopy(model)
    other.load_state_dict(back)
    original = sum(4 * tensor.numel() for tensor in state_dict.values())
    of = {name: last_bits if name.startswith("5") else bits for name in state_dict}
    return {
        "accuracy": accuracy(other, test),
        "ratio": original / size,
        "bytes": size,
        "stages": [original / value for value in stages(back, of)],
        "exact": all(torch.equal(back[name], tensor) for name, tensor in state_dict.items()),
        "largest_error": max(line.rms_error for line in done.tensors),
        "milliseconds": 1e3 * seconds,
    }


def run(seed: int, quick: bool) -> dict[str, Any]:
    """Return what one trained network is worth dense and in every setting."""
    data, test = digits(seed)
    steps = 40 if quick else STEPS
    model = train(lenet(seed), data, seed, steps)
    found: dict[str, Any] = {"dense": accuracy(model, test)}
    found["dense, trained on"] = accuracy(train(copy.deepcopy(model), data, 100 + seed, steps), test)
    for name, (settings, *_) in SETTINGS.items():
        sparsity, bits, last_bits = settings
        prune = {"sparsity": sparsity, "begin": 0.0, "end": 0.5}
        share = {"bits": bits, "bits_of": [f"last={last_bits}"], "begin": 0.75, "min_size": 0}
        pruned = train(copy.deepcopy(model), data, 100 + seed, steps, {"prune": prune})
        found[f"{name}: pruned"] = accuracy(pruned, test)
        found[f"{name}: k-means"] = compressed(pruned, settings, test)
        shared = train(copy.deepcopy(model), data, 100 + seed, steps, {"prune": prune, "cluster": share})
        found[f"{name}: trained"] = compressed(shared, settings, test)
    return found


def measure(quick: bool, runs: Runs) -> list[Row]:
    found = [runs.of(f"seed {seed}", lambda seed=seed: run(seed, quick)) for seed in range(1 if quick else SEEDS)]
    dense = [one["dense"] for one in found]
    on = [one["dense, trained on"] for one in found]
    rows = [Row("dense, fp32, accuracy; the same, trained on", f"{spread(dense, 2)}; {spread(on, 2)} %", "95.11 %")]
    for name, (_, ratio, loss, prototype) in SETTINGS.items():
        files = [one[f"{name}: trained"] for one in found]
        untrained = [one[f"{name}: k-means"] for one in found]
        pruned = [one[f"{name}: pruned"] for one in found]
        lost = [before - file["accuracy"] for before, file in zip(dense, files, strict=True)]
        lost_on = [longer - file["accuracy"] for longer, file in zip(on, files, strict=True)]
        clustered = [file["accuracy"] for file in untrained]
        rows.append(
            Row(
                f"{name}: accuracy pruned; k-means alone; centroids trained too",
                f"{spread(pruned, 2)}; {spread(clustered, 2)}; {spread([file['accuracy'] for file in files], 2)} %",
            )
        )
        values, codes = (mean([file["stages"][stage] for file in files]) for stage in (0, 1))
        ratios = [file["ratio"] for file in files]
        met = min(ratios) >= ratio and mean(lost) <= loss
        rows.append(
            Row(
                f"{name}: ratio with 5-bit gaps and fp32 values, with codes, of the file; its size; points lost; "
                "against dense trained on",
                f"{values:.1f}x, {codes:.1f}x, {spread(ratios)}x; {mean([file['bytes'] for file in files]) / 1024:.1f} "
                f"KiB; {spread(lost, 2)}; {spread(lost_on, 2)}",
                prototype,
                target=f">= {ratio:g}x in each seed, <= {loss} points lost",
                met=met,
            )
        )
        exact = sum(file["exact"] and not file["largest_error"] for file in files)
        rows.append(
            Row(
                f"{name}: weights restored bit for bit as trained; time to restore them",
                f"{exact} of {len(files)} files; {mean([file['milliseconds'] for file in files]):.1f} ms",
                target="all",
                met=exact == len(files),
            )
        )
    return rows


if __name__ == "__main__":
    main(measure)
