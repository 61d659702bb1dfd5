"""Distillation as a bare technique: attached, begun, and driven a loss at a time."""

import copy

import torch

from shared_core import Session
from shared_core.distillation import Distillation, DistillConfig
from shared_core.engine.recipe import Recipe
from shared_core.engine.technique import Context


def attached(model, teacher, services=None, total_steps=10, **options):
    technique = Distillation(DistillConfig(**{"teacher": teacher, **options}))
    context = Context(model, total_steps=total_steps, **({} if services is None else {"services": services}))
    technique.attach(context)
    technique.begin(context, None)
    return technique, context


class Run:
    """A plain loop of a recipe, which can stop and go on; a subclass says how it goes `backward`."""

    def __init__(self, model, recipe, steps, state=None, optimizer=None, services=None):
        self.model, self.taken = model, 0
        self.session = Session(Recipe.from_dict(recipe), seed=2, services=services)
        self.session.attach(model)
        self.optimizer = (optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01)))(model.parameters())
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.session.load_state_dict(state["session"])
            self.taken = state["taken"]
            torch.set_rng_state(state["rng"])
        self.session.begin([self.optimizer], total_steps=steps)

    @property
    def technique(self):
        return self.session.techniques["distill"]

    def step(self, *args):
        loss = self.backward(*args)
        self.session.before_step()
        self.optimizer.step()
        self.session.after_step()
        self.model.zero_grad()
        self.taken += 1
        return loss

    def state(self):
        return copy.deepcopy({
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "session": self.session.state_dict(), "taken": self.taken, "rng": torch.get_rng_state(),
        })  # fmt: skip


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=generator).to(dtype), torch.randint(3, (8,), generator=generator)
