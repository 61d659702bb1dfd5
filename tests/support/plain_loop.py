"""What a plain loop does with a session, for tests that need no more of it."""

import torch

from shared_core import Recipe, Session


def begun_session(recipe, model, total_steps, lr=0.1, **options):
    """Return a session that has begun on a model, and its optimizer."""
    session = Session(recipe if isinstance(recipe, Recipe) else Recipe.from_dict(recipe), **options)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    session.begin([optimizer], total_steps=total_steps)
    return session, optimizer


def plain_step(session, optimizer, loss=None):
    """Step with the gradients of a loss, or with those that are there; return whether the step was applied."""
    if loss is not None:
        session.loss(loss).backward()
    session.before_optimizer_step()
    optimizer.step()
    applied = session.after_optimizer_step()
    optimizer.zero_grad()
    return applied
