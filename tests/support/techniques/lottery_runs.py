"""A small training as users write it, in a Session with a recipe, for the tests of lottery tickets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared_core import Recipe, Session

STEPS = 12
CLIP = 0.5
PRUNED = ("0.weight", "3.weight", "5.weight")
RATE = 0.3


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The examples of a step: the same in every run."""
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(100 + step))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS + 4)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, labels = batch(step)
    return nn.functional.cross_entropy(model(x), labels)


def train(
    recipe: Recipe,
    *,
    seed: int = 0,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    steps: int = STEPS,
    evaluate_every: int = 4,
    each_step: Callable[[Session, nn.Module, torch.optim.Optimizer], None] | None = None,
    state: Any = None,
) -> tuple[nn.Module, Session]:
    """Train once and return the model and its finished session; a resumed run goes on from `state`, of `snapshot`."""
    model = make_net(seed) if model is None else model
    session = Session(recipe)
    session.attach(model)
    optimizers = optimizer(model)
    schedule = cosine(optimizers)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        session.load_state_dict(state["session"])
    session.begin([optimizers], total_steps=steps)
    for step in range(session.step, steps):
        model.train()
        session.loss(loss_of(model, step)).backward()
        session.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizers.step()
        session.after_step()
        schedule.step()
        optimizers.zero_grad()
        if (step + 1) % evaluate_every == 0:
            with session.swapped("evaluate"), torch.no_grad():
                loss = float(loss_of(model.eval(), 999))
            session.evaluated({"val_loss": loss, "eval_runtime": float(step)})
        if each_step is not None:
            session.schedule = schedule  # type: ignore[attr-defined]
            each_step(session, model, optimizers)
    session.finish()
    return model, session


def snapshot(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a checkpoint of such a run holds."""
    import copy

    schedule = session.schedule  # type: ignore[attr-defined]
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "session": session}
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def ticket_recipe(out: Any, **options: Any) -> Recipe:
    return Recipe.from_dict({"lottery": {"out": str(out), "rate": RATE, **options}})


def pruned_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: dict(model.named_parameters())[name] for name in PRUNED}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items()) and first.keys() == second.keys()
