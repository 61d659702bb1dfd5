"""What each technique must leave with any optimizer, recounted without this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from optimizer_kinds import Kind
from optimizer_runs import (
    ALPHA,
    BATCH,
    ROWS,
    STEPS,
    TEMPERATURE,
    Examples,
    Net,
    Run,
    State,
    Teacher,
    checkpoint,
    replay,
    train,
)
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

BEGIN, RANK, CLIP, POISONED = 3, 4, 0.1, 5
LOOSE = 2e-2
"""Share of the way trained by which rounding in another order may move weights (sign updates, codes of 8 bits)."""


class CellError(Exception):
    """A run left something else than the technique promises."""


def must(holds: bool, what: str) -> None:
    """Raise an error that says what is wrong."""
    if not holds:
        raise CellError(what)


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def apart(one: State, other: State, start: State) -> float:
    """Return the distance of two results, as a share of the way trained."""

    def norm(a: State, b: State) -> float:
        return sum(float((a[name].double() - b[name].double()).square().sum()) for name in start) ** 0.5

    return norm(one, other) / max(norm(other, start), 1e-12)


def stop_of(kind: Kind) -> int:
    """Return the step to resume from. Lightning alone resumes exactly only where an epoch ends."""
    return 6 if kind.loop == "hf" else ROWS // BATCH


@dataclass
class Cell:
    """One optimizer with one technique."""

    kind: Kind
    folder: Path
    plain: Run
    """The run without techniques."""
    recipe: dict[str, Any] = field(default_factory=dict)
    made: int = 0

    def net(self, **options: Any) -> Net:
        return Net(self.kind.bias, **options)

    @property
    def start(self) -> State:
        return {name: value.detach() for name, value in self.net().state_dict().items()}

    def run(self, recipe: dict[str, Any], net: Net | None = None, resume: Path | None = None) -> Run:
        self.made += 1
        self.recipe = recipe
        self.last = self.net() if net is None else net
        return train(self.kind, self.last, self.folder / str(self.made), recipe, resume)

    def resumes(self, run: Run, net: Net | None = None) -> None:
        """Resume from the checkpoint of a step, and compare the end bit for bit."""
        again = self.run(self.recipe, net, checkpoint(run, stop_of(self.kind)))
        must(equal(again.weights, run.weights), f"resumed: {apart(again.weights, run.weights, self.start):.1g} apart")

    def same_until(self, run: Run, step: int) -> None:
        """Compare checkpoints with those without the technique, bit for bit."""
        for at in range(1, step + 1):
            must(equal(run.steps[at], self.plain.steps[at]), f"other weights than without at step {at}")


def matrices(weights: State, head: bool = False) -> State:
    return {name: one.float() for name, one in weights.items() if one.ndim == 2 and (head or "head" not in name)}


def prune(cell: Cell) -> None:
    first = BEGIN * cell.kind.steps_per_batch
    run = cell.run({"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": first, "end": first}})
    cell.same_until(run, BEGIN - 1)
    zeros = {name: value == 0 for name, value in matrices(run.steps[BEGIN], head=True).items()}
    count, total = sum(int(one.sum()) for one in zeros.values()), sum(one.numel() for one in zeros.values())
    must(count >= 0.5 * total, f"{count} of {total} weights are zero after the step that prunes")
    for weights in (*(run.steps[step] for step in range(BEGIN, STEPS + 1)), run.weights, run.saved):
        must(all(bool((weights[name][mask] == 0).all()) for name, mask in zeros.items()), "pruned weights came back")
    must(apart(run.weights, run.steps[BEGIN], run.steps[BEGIN]) > 0, "nothing trained on")
    cell.resumes(run)


def qat(cell: Cell) -> None:
    run = cell.run({"qat": {"scheme": "int8", "begin": BEGIN * cell.kind.steps_per_batch}})
    cell.same_until(run, BEGIN - 1)
    for name, weight in matrices(run.saved).items():
        code = weight.double() / weight.double().abs().amax(1, keepdim=True).clamp(min=1e-30) * 127
        must(bool((code - code.round()).abs().max() < 1e-3), f"{name} is on no grid of 8 bits")
    must(equal(run.weights, run.saved), "the saved weights are not the model's")
    cell.resumes(run)


def average(cell: Cell) -> None:
    per_batch = cell.kind.steps_per_batch
    run = cell.run({"average": {"kind": "swa", "begin": BEGIN * per_batch, "every": per_batch}})
    cell.same_until(run, STEPS)
    # what a step leaves of weights that have modes
    members = [run.steps[step] for step in range(BEGIN, STEPS + 1)]
    mean = {name: sum(one[name].double() for one in members) / len(members) for name in members[0]}
    for weights in (run.weights, run.saved):
        distance = apart(weights, mean, {name: torch.zeros_like(value) for name, value in mean.items()})
        must(distance < 1e-6, f"{distance:.1g} of its norm from the mean of the checkpoints")
    cell.resumes(run)


def distill(cell: Cell) -> None:
    teacher = Teacher(seed=7).eval().requires_grad_(False)
    begin = BEGIN * cell.kind.steps_per_batch
    run = cell.run({"distill": {"teacher": teacher, "temperature": TEMPERATURE, "alpha": ALPHA, "begin": begin}})
    cell.same_until(run, BEGIN)
    ours = train(cell.kind, cell.net(teacher=[teacher], begin=BEGIN), cell.folder / "loss")
    distance = apart(run.weights, ours.weights, cell.start)
    must(distance < LOOSE, f"{distance:.1g} from a run whose loss has the soft term")
    must(not equal(run.weights, cell.plain.weights), "the same weights as without")
    cell.resumes(run)


def clipped(net: Net, index: Tensor) -> None:
    """Fill the gradients with the sum of single examples' clipped gradients over the batch size."""
    data, sums = Examples(), [torch.zeros_like(one) for one in net.parameters()]
    for one in index:
        grads = torch.autograd.grad(net(**data.batch(one[None]))["loss"], [*net.parameters()])
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for total, grad in zip(sums, grads, strict=True):
            total += grad * min(1.0, CLIP / max(float(norm), 1e-30))
    for parameter, total in zip(net.parameters(), sums, strict=True):
        parameter.grad = total / BATCH


def dp(cell: Cell) -> None:
    recipe = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "seed": 0}
    seen: list[list[Tensor]] = []
    watch = register_optimizer_step_pre_hook(
        lambda *_: seen.append([one.grad.clone() for one in cell.last.parameters() if one.grad is not None])
    )
    run = cell.run({"dp": recipe})
    watch.remove()
    distance = apart(run.weights, replay(cell.kind, cell.net(), run.net.seen, clipped), cell.start)
    if distance > LOOSE:  # SOAP turns rounding into other eigenvectors of gradients that have few
        same_gradients(cell, run, seen)
    cell.resumes(run)
    noisy = cell.run({"dp": {**recipe, "noise_multiplier": 1.0}})
    must(apart(noisy.weights, run.weights, cell.start) > LOOSE, "noise changed nothing")


def same_gradients(cell: Cell, run: Run, seen: list[list[Tensor]]) -> None:
    """Compare the gradients that the optimizer got in each step with clipped ones of the same weights."""
    must(len(seen) == STEPS, f"{len(seen)} steps")
    for step, (index, grads) in enumerate(zip(run.net.seen, seen, strict=True)):
        net = cell.net()
        net.load_state_dict(run.steps[step] if step else cell.start)
        clipped(net, index)
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            distance = float((parameter.grad - grad).norm() / (parameter.grad.norm() + 1e-12))
            must(distance < 1e-4, f"{distance:.1g} from gradients clipped one by one")


def primary_weights(cell: Cell) -> None:
    run = cell.run({"primary_weights": {"kind": "fp32_copy"}}, cell.net().bfloat16())
    data, half = Examples(), cell.net().bfloat16()

    def rounded(net: Net, index: Tensor) -> None:
        for copy, parameter in zip(half.parameters(), net.parameters(), strict=True):
            copy.data.copy_(parameter.data)
            copy.grad = None
        half(**data.batch(index))["loss"].backward()
        for copy, parameter in zip(half.parameters(), net.parameters(), strict=True):
            parameter.grad = copy.grad.float()

    single = cell.net()
    single.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    same = replay(cell.kind, single, run.net.seen, rounded)
    start = {name: value.detach() for name, value in cell.net().bfloat16().state_dict().items()}
    distance = apart(run.weights, {name: value.bfloat16() for name, value in same.items()}, start)
    must(distance < LOOSE, f"{distance:.1g} from steps of float32 weights")
    cell.resumes(run, cell.net().bfloat16())


def loss_scale(cell: Cell) -> None:
    recipe = {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 3}}
    run = cell.run(recipe)
    must(equal(run.weights, cell.plain.weights), "other weights than without, though no step was skipped")
    poisoned = cell.run(recipe, cell.net(poisoned=POISONED))
    data = Examples()

    def backward(net: Net, index: Tensor) -> None:
        net(**data.batch(index))["loss"].backward()

    kept = [index for at, index in enumerate(poisoned.net.seen, 1) if at != POISONED]
    same = replay(cell.kind, cell.net(), kept, backward)
    must(equal(poisoned.weights, same), f"{apart(poisoned.weights, same, cell.start):.1g} from a run without the "
         "step that overflowed")  # fmt: skip
    cell.resumes(poisoned, cell.net(poisoned=max(POISONED - stop_of(cell.kind), 0)))


def _rank(weights: State) -> int:
    values = [torch.linalg.svdvals(weight.double()) for weight in weights.values()]
    return max(int((one > 1e-4 * one[0]).sum()) for one in values)


def low_rank(cell: Cell) -> None:
    run = cell.run({"low_rank": {"rank": str(RANK), "merge": True, "min_size": 64, "force": True}})
    rank = _rank(matrices(run.saved))
    must(rank <= RANK, f"rank {rank}")
    must(apart(run.weights, run.saved, cell.start) < 1e-6, "the saved weights are not the model's")
    cell.resumes(run)


def lora(cell: Cell) -> None:
    run = cell.run({"lora": {"rank": RANK, "save": "merged"}})
    start = cell.start
    must(run.saved.keys() == start.keys(), "other tensors than the model's")
    rank = _rank({name: value - start[name] for name, value in matrices(run.saved).items()})
    must(0 < rank <= RANK, f"training added rank {rank}")
    frozen = [name for name, value in start.items() if value.ndim == 1 and "head" not in name]
    must(all(torch.equal(run.saved[name], start[name]) for name in frozen), "frozen weights moved")
    cell.resumes(run)


CHECKS: dict[str, Callable[[Cell], None]] = {
    check.__name__: check for check in (prune, qat, average, distill, dp, primary_weights, loss_scale, low_rank, lora)
}
"""By technique: what a run with it must leave."""
