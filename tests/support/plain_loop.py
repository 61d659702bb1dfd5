"""What a plain loop does with a session, for tests that need no more of it."""

import torch

from shared_core import Session


def begun_session(recipe, model, total_steps, lr=0.1, **options):
    """Return a session that has begun on a model, and its optimizer."""
    session = Session(recipe, **options)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    session.begin([optimizer], total_steps=total_steps)
    return session, optimizer


def scaler_of(session):
    return getattr(session.techniques.get("loss_scale"), "scaler", None)


def backward(session, loss):
    scaler = scaler_of(session)
    (loss if scaler is None else scaler.scale(loss)).backward()


def update(session, optimizer, change=lambda: None):
    """Step with the gradients that are there, changed once unscaled; return whether the step was applied."""
    scaler = scaler_of(session)
    if scaler is not None:
        scaler.unscale_(optimizer)
    session.before_step()
    change()
    if scaler is None:
        optimizer.step()
        applied = session.after_step()
    else:
        scaler.step(optimizer)
        skipped = scaler.was_skipped(optimizer)
        scaler.update()
        applied = session.after_step(applied=False) if skipped else session.after_step()
    optimizer.zero_grad()
    return applied


def plain_step(session, optimizer, loss=None):
    """Step with the gradients of a loss, or with those that are there; return whether the step was applied."""
    if loss is not None:
        backward(session, session.loss(loss))
    return update(session, optimizer)
