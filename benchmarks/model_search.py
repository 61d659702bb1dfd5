"""`eff search` with TPE and with random sizes, and uniform cuts, on scikit-learn's digits.

A small ViT learns 1197 images. Every candidate, with 1 to 4 layers and eight numbers of neurons, is cut from it and
healed by distillation for a tenth of its training. The accuracy is that on the 600 images left. As in tabular
benchmarks, all 32 candidates of a net are trained once, so that searches of several seeds only look their
figures up. They run as `eff search` does, with a training command that reads the table.

    python benchmarks/model_search.py [--nets 1] [--seeds 6] [--trials 8] [--limit 0.5]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from shared_core.distillation import kd_loss
from shared_core.libraries import installed_version
from shared_core.runs import Candidates, ModelSearch

STEPS, HEALING, BATCH, RATE = 600, 60, 64, 3e-3
SIZES = {"layers": [1, 2, 3, 4], "intermediate_size": [12, 24, 36, 48, 60, 72, 84, 96]}
LOOK_UP = """
import json, os, pathlib, shutil, sys
student, out = map(pathlib.Path, sys.argv[2:4])
config = json.loads((student / "config.json").read_text())
table = json.loads(pathlib.Path(sys.argv[1]).read_text())
accuracy = table[f"{config['num_hidden_layers']} {config['intermediate_size']}"]
shutil.copytree(student, out, dirs_exist_ok=True)
(out / "all_results.json").write_text(json.dumps({"eval_accuracy": accuracy}))
pathlib.Path(os.environ["EFF_RECEIPT"]).write_text('{"techniques": {"distill": {"batches": 1}}}')
"""


def data(seed: int) -> tuple[torch.Tensor, ...]:
    """Return images and labels to learn, and others to judge by."""
    images, labels = load_digits(return_X_y=True)
    pixels, classes = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    return pixels[order[:1197]], classes[order[:1197]], pixels[order[1197:]], classes[order[1197:]]


def train(net: Any, images: torch.Tensor, labels: torch.Tensor, steps: int, seed: int, teacher: Any = None) -> None:
    """Train a net in place, with a teacher by distillation too."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    net.train()
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,), generator=generator)
        logits = net(images[batch]).logits
        loss = F.cross_entropy(logits, labels[batch])
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(images[batch]).logits
            loss = (loss + kd_loss(logits, taught)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    net.eval()


@torch.no_grad()
def accuracy(net: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that a net recognizes, in percent."""
    return 100 * float((net(images).logits.argmax(1) == labels).double().mean())


def candidates_of(seed: int) -> tuple[Candidates, dict[str, float]]:
    """Return the candidates of a net, and their accuracy after healing by layers and neurons."""
    images, labels, unseen, truth = data(seed)
    torch.manual_seed(seed)
    net: nn.Module = ViTForImageClassification(ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=48, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_labels=10,
    ))  # fmt: skip
    train(net, images, labels, STEPS, seed)
    batches = [{"pixel_values": images[:64]}]
    candidates = Candidates(net, batches, {"pixel_values": images[:2]}, sizes=SIZES, cost="flops")
    found = {}
    for layers in SIZES["layers"]:
        for neurons in SIZES["intermediate_size"]:
            smaller = candidates.cut({"layers": layers, "intermediate_size": neurons})
            if smaller is not net:
                train(smaller, images, labels, HEALING, seed, net)
            found[f"{layers} {neurons}"] = accuracy(smaller, unseen, truth)
    return candidates, found


def best_of(candidates: Candidates, found: dict[str, float], sampler: str, seed: int, asked: Any) -> float:
    """Return the best accuracy within the limit after a search."""
    with tempfile.TemporaryDirectory() as folder:
        script, table = Path(folder, "look_up.py"), Path(folder, "table.json")
        script.write_text(LOOK_UP)
        table.write_text(json.dumps(found))
        command = ["env", sys.executable, "-S", str(script), str(table), "{student}", "{out}"]
        options = {"limit": asked.limit, "sampler": sampler, "seed": seed, "metric": "eval_accuracy"}
        done = ModelSearch(command, Path(folder, "search"), candidates, **options).run(asked.trials)
        return done.best.quality if done.best else float("nan")


def uniform(candidates: Candidates, found: dict[str, float], limit: float) -> float:
    """Return the best accuracy within the limit of cuts to the same share of every size."""
    fitting = [sizes for sizes in candidates.uniform((3 / 4, 1 / 2, 1 / 4))
               if candidates.cost(candidates.cut(sizes)).share <= limit]  # fmt: skip
    return max(found[f"{sizes['layers']} {sizes['intermediate_size']}"] for sizes in fitting)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--limit", type=float, default=0.5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{datetime.date.today()}, CPU, one thread. torch {torch.__version__}, optuna {installed_version('optuna')}.\n"
    )
    print(
        f"Accuracy in % within {asked.limit} of the FLOPs, {asked.trials} trainings, {asked.seeds} seeds per search.\n"
    )
    print("| net | uncut | uniform cuts | random | TPE | best of all |\n|---|---|---|---|---|---|")
    for seed in range(asked.nets):
        candidates, found = candidates_of(seed)
        scores = {
            sampler: [best_of(candidates, found, sampler, number, asked) for number in range(asked.seeds)]
            for sampler in ("random", "tpe")
        }
        shares = {}
        for sizes in ((layers, neurons) for layers in SIZES["layers"] for neurons in SIZES["intermediate_size"]):
            smaller = candidates.cut(dict(zip(SIZES, sizes, strict=True)))
            shares["{} {}".format(*sizes)] = candidates.cost(smaller).share
        most = max(found[name] for name, share in shares.items() if share <= asked.limit)
        lines = [
            " / ".join(f"{score:.1f}" for score in of) + f" (mean {statistics.mean(of):.2f})" for of in scores.values()
        ]
        print(
            f"| {seed} | {found['4 96']:.1f} | {uniform(candidates, found, asked.limit):.1f} | {lines[0]} | {lines[1]} "
            f"| {most:.1f} |", flush=True,
        )  # fmt: skip
        print(json.dumps({"net": seed, "accuracy": found, "share": shares}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
