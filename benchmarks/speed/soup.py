"""Greedy soup of large checkpoints beside the reference algorithm, and an update of running averages beside torch's."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import MIB, Row, interleaved, main, milliseconds, python, ratio, run_and_watch, share_of_copy
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared_core.engine.technique import Context
from shared_core.weight_average import AverageConfig, WeightAverage

PROGRAMS = str(Path(__file__).with_name("soup_programs.py"))
CHECKPOINTS, FEW = 16, 4
MEMORY_TARGET, TIME_TARGET = 1.6, 0.45
UPDATE_TARGET = 1.0


def compare(folder: Path, scores: str, checkpoints: int, model_bytes: int, rounds: int) -> Row:
    """Run both in processes of their own, in turn, on the same files."""
    seconds: dict[str, list[float]] = {"ours": [], "reference": []}
    peaks: dict[str, int] = {"ours": 0, "reference": 0}
    members: dict[str, Any] = {}
    for i in range(rounds):
        for name in ("ours", "reference") if i % 2 else ("reference", "ours"):
            result, peak = run_and_watch(python(PROGRAMS, name, str(folder), scores))
            seconds[name].append(result["seconds"])
            peaks[name] = max(peaks[name], peak)
            members[name] = result["members"]
    if members["ours"] != members["reference"]:
        raise RuntimeError(f"both must find the same soup, got {members}")
    _, empty = run_and_watch(python(PROGRAMS, "nothing", str(folder), scores))
    time = ratio(seconds, "ours", "reference")
    _, few = run_and_watch(python(PROGRAMS, "ours", str(folder), scores, str(FEW)))
    ours, peer = (peaks[name] / model_bytes for name in ("ours", "reference"))
    which = "scores of the single ones known" if scores == "known" else "single ones scored first"
    return Row(
        f"greedy soup of {checkpoints} x {model_bytes / 4e6:.0f} M parameters, {which}; "
        f"{len(members['ours'])} accepted",
        f"{statistics.median(seconds['ours']):.2f} s CPU",
        f"reference {statistics.median(seconds['reference']):.2f} s CPU",
        f"{time.text()} of the reference",
        f"{ours:.2f} models ({few / model_bytes:.2f} for {FEW} checkpoints), peer {peer:.2f} "
        f"(a bare interpreter with torch, within: {empty / MIB:.0f} MiB)",
        f"<= {TIME_TARGET}, < {MEMORY_TARGET} models, as for {FEW} checkpoints",
        time.median <= TIME_TARGET and ours < MEMORY_TARGET and peaks["ours"] <= few + 0.05 * model_bytes,
    )


def update(width: int, layers: int, rounds: int) -> Row:
    """Measure what an average adds to a step: all that the technique does in one, beside torch's update of the same."""
    model = nn.Sequential(*[nn.TransformerEncoderLayer(width, 8, 4 * width) for _ in range(layers)])
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    technique, context = WeightAverage(AverageConfig(kind="ema", warmup=False)), Context(model=model, step=1)
    variants = {
        "ours": lambda: technique.after_step(context, True),
        "torch": lambda: peer.update_parameters(model),
    }
    times = interleaved(variants, rounds=rounds, calls=5, warmup=2)
    for mine, theirs in zip(technique.state_dict()["kept"][0].values(), peer.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    time, parameters = ratio(times, "ours", "torch"), list(model.parameters())
    return Row(
        f"update of an exponential average of {sum(p.numel() for p in parameters) / 1e6:.1f} M parameters in "
        f"{len(parameters)} tensors",
        f"{milliseconds(times, 'ours')} CPU",
        f"AveragedModel(multi_avg_fn) {milliseconds(times, 'torch')} CPU",
        f"{time.text()} of torch's",
        target=f"<= {UPDATE_TARGET}",
        met=time.median <= UPDATE_TARGET,
        roofline=share_of_copy(3 * sum(p.nbytes for p in parameters), times["ours"]),
    )


def measure(quick: bool, parameters: int) -> list[Row]:
    parameters = min(parameters, 10_000_000) if quick else parameters
    needed = 1.1 * CHECKPOINTS * parameters * 4
    with tempfile.TemporaryDirectory(prefix="eff-bench-soup-") as name:
        free = shutil.disk_usage(name).free
        if free < needed:
            sys.exit(
                f"soup: {name} must have {needed / 1e9:.1f} GB free, got {free / 1e9:.1f}; set TMPDIR to a "
                "folder on a larger disk, or give fewer --parameters"
            )
        made, _ = run_and_watch(python(PROGRAMS, "make", name, str(CHECKPOINTS), str(parameters)))
        soups = [
            compare(Path(name), scores, CHECKPOINTS, made["bytes"], rounds=1 if quick else rounds)
            for scores, rounds in (("known", 3), ("unknown", 1))
        ]
    rounds = 5 if quick else 21
    return [*soups, update(512, 6, rounds), update(64, 100, rounds)]


if __name__ == "__main__":
    main(measure, parameters=100_000_000)
