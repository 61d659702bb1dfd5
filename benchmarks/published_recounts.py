"""Count the contents of the files that a training script saved, without this library."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Weights = Mapping[str, Tensor]
TEMPERATURE, RANK, SPARSITY = 2.0, 4, 0.5


class RecountError(Exception):
    """The files do not hold what the run was to leave."""


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise RecountError(what)


class Saved:
    """The files of a run, of the same run without a technique, and what both began with.

    Args:
        out: The run's output folder.
        without: That of the run without a technique.
        start: The folder of the model that both trained.
        teacher: The folder of a larger model of the same kind.
    """

    def __init__(self, out: Path, without: Path, start: Path, teacher: Path) -> None:
        self.out, self.without_folder, self.start_folder, self.teacher = out, without, start, teacher
        self.weights, self.without, self.start = map(weights_of, (out, without, start))
        same = {name: value.shape for name, value in self.start.items()}
        _must({name: value.shape for name, value in self.weights.items()} == same, "other tensors than at the start")
        _must(all(value.isfinite().all() for value in self.weights.values()), "weights that are not finite")
        _must(not _equal(self.weights, self.start), "the weights of the start")

    def of_layers(self) -> dict[str, Tensor]:
        """Return the matrices of attention and MLP."""
        return {name: value for name, value in self.weights.items() if name.endswith("_proj.weight")}

    def logged(self, figure: str) -> float:
        """Return a figure of the run's first step."""
        return logged(self.out, figure)


def logged(folder: Path, figure: str) -> float:
    """Return a figure of the first step in a log."""
    lines = [line for line in (folder / "stdout").read_text().splitlines() if line.startswith("{'loss'")]
    return float(ast.literal_eval(lines[0])[figure])


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def _apart(one: Weights, other: Weights) -> float:
    return sum(float((value - other[name]).double().square().sum()) for name, value in one.items()) ** 0.5


def zeros(saved: Saved) -> str:
    """Count zeros in all matrices but the embedding."""
    layers = {name: value for name, value in saved.weights.items() if value.ndim == 2 and "embed" not in name}
    count, total = (sum(map(size, layers.values())) for size in (lambda w: int((w == 0).sum()), Tensor.numel))
    _must(count >= int(SPARSITY * total), f"{count:,} of {total:,} weights are zero")
    return f"{count:,} of {total:,}"


def codes(saved: Saved) -> str:
    """Count the codes of matrices of which each row is a scale times integers of 8 bits."""
    most = 0
    for name, weight in saved.weights.items():
        if weight.ndim == 2 and name != "score.weight":
            scale = weight.double().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            code = weight / scale
            _must(bool((code - code.round()).abs().max() < 1e-3), f"{name} is on no grid of 8 bits")
            most = max(most, len(code.round().unique()))
    ranges = json.loads((saved.out / "eff_deployment.json").read_text())["qat"]["ranges"]
    inputs = sum("max" in layer for layer in ranges.values())
    _must(inputs >= len(saved.of_layers()), f"only {inputs} layers' inputs have a range")
    return f"{most} codes, {inputs} ranges"


def soft_term(saved: Saved) -> str:
    """Recompute the first step's soft term, of all examples, in float64."""
    scores = "score.weight" in saved.weights
    found = _scores(saved) if scores else _divergence(saved)
    logged = saved.logged("distill/soft_loss")
    _must(abs(logged / found - 1) < 1e-3, f"the log has {logged}, the formula {found:.4g}")
    return f"{logged:.4g}"


def _texts(saved: Saved) -> list[Tensor]:
    from transformers import AutoTokenizer

    data = saved.start_folder.parent / ("answers" if "score.weight" in saved.weights else "texts")
    tokenizer = AutoTokenizer.from_pretrained(saved.start_folder)
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    return [torch.tensor([[*tokenizer(text)["input_ids"], 1]]) for row in rows for text in row.values()]


def _divergence(saved: Saved) -> float:
    from transformers import AutoModelForCausalLM

    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
                        for folder in (saved.start_folder, saved.teacher))  # fmt: skip
    total, count = 0.0, 0
    with torch.no_grad():
        for text in _texts(saved):
            s, t = (torch.log_softmax(model(text).logits[0, :-1] / TEMPERATURE, -1) for model in (student, teacher))
            total += TEMPERATURE**2 * float((t.exp() * (t - s)).sum())
            count += len(s)
    return total / count


def _scores(saved: Saved) -> float:
    from transformers import AutoModelForSequenceClassification

    student, teacher = (AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
                        for folder in (saved.start_folder, saved.teacher))  # fmt: skip
    with torch.no_grad():
        apart = [float((student(text).logits - teacher(text).logits).square()) for text in _texts(saved)]
    return sum(apart) / len(apart)


def mean_of_checkpoints(saved: Saved) -> str:
    """Average the checkpoints, and compare."""
    members = [weights_of(folder) for folder in saved.out.glob("checkpoint-*")]
    _must(len(members) > 1, f"{len(members)} checkpoints")
    mean = {name: sum(member[name].double() for member in members) / len(members) for name in saved.weights}
    apart = _apart(saved.weights, mean) / _apart(mean, saved.start)
    _must(apart < 1e-5, f"{apart:.2g} from the mean of {len(members)} checkpoints")
    return f"of {len(members)}"


def merged_rank(saved: Saved) -> str:
    """Count the singular values of what training added, and compare the frozen weights."""
    layers = saved.of_layers()
    most = 0
    for name, weight in layers.items():
        values = torch.linalg.svdvals((weight - saved.start[name]).double())
        most = max(most, int((values > 1e-3 * values[0]).sum()))
    _must(most <= RANK, f"training added a matrix of rank {most}")
    return f"rank {most}, {_frozen(saved)} frozen"


def _frozen(saved: Saved) -> int:
    norms = [name for name, value in saved.weights.items() if value.ndim == 1]
    _must(all(torch.equal(saved.weights[name], saved.start[name]) for name in norms), "frozen weights moved")
    return len(norms)


def same_file(saved: Saved) -> str:
    """Compare the weights with those without the technique, bit for bit."""
    _must(_equal(saved.weights, saved.without), "other weights than without")
    receipt = json.loads((saved.out / "eff_receipt.json").read_text())["techniques"]["checkpointing"]
    _must(receipt["recomputations"] > 0, "nothing was recomputed")
    return "the same"


def rounded_products(saved: Saved) -> str:
    """Compare the first gradient's norm with that without the technique, and look whether every product was one."""
    ours, without = saved.logged("grad_norm"), logged(saved.without_folder, "grad_norm")
    _must(ours != without and 0.5 < ours / without < 2, f"the first gradient's norm is {ours}, without {without}")
    layers = json.loads((saved.out / "eff_receipt.json").read_text())["techniques"]["fp8"]["per_layer"]
    _must(all(all(layer["emulated"].values()) or layer["native"] for layer in layers), "a layer without FP8 products")
    return f"{ours}, {without}"


def lora_codes(saved: Saved) -> str:
    """Count codes, and compare the frozen norms."""
    return f"{codes(saved)}, {_frozen(saved)} frozen"


RECOUNTS: dict[str, tuple[str, tuple[Callable[[Saved], str], ...]]] = {
    "prune": ("zeros", (zeros,)),
    "qat": ("codes and ranges", (codes,)),
    "distill": ("first soft term, in float64", (soft_term,)),
    "average": ("mean of the checkpoints", (mean_of_checkpoints,)),
    "soup": ("mean of the checkpoints", (mean_of_checkpoints,)),
    "lora": ("rank of the change, frozen tensors", (merged_rank,)),
    "checkpointing": ("same file as without", (same_file,)),
    "fp8": ("first gradient", (rounded_products,)),
    "prune, qat": ("zeros, codes and ranges", (zeros, codes)),
    "prune, distill": ("zeros and soft term", (zeros, soft_term)),
    "lora, qat": ("codes, ranges, frozen tensors", (lora_codes,)),
}
"""Of each technique: what is counted, and how."""
