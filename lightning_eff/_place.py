"""Where a run is among its epochs and batches, and a Trainer's loops put back to exactly there.

Lightning (2.6) guesses from its counters where a checkpoint was saved, and changes them as it goes on from there: an
epoch saved after its last batch is counted as over, a batch that was cut short counts twice, validations and optimizer
steps are counted again. A run that is stopped twice adds these up. So the place is written down, and the loops go on
from it as if they had never stopped.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class Place(TypedDict):
    """A place in a run, as it is saved."""

    epoch: Literal["begins", "within", "ended"]
    """Before an epoch, inside one, or at its end, with nothing left of it but its schedulers on a plateau."""
    left: Literal["batch", "end", "validation", "rest", ""]
    """What is left of the last batch: all of it, or what comes after it: a validation that was due, or going on and is
    run again, what follows a validation, nothing."""


def place_of(trainer: Any, is_validating: bool) -> Place:
    """Return where a Trainer is now.

    Args:
        trainer: In the middle of `fit`.
        is_validating: Whether a validation has begun and not ended.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    if epochs.started == epochs.processed:
        return {"epoch": "ended" if epochs.completed < epochs.processed == epochs.ready else "begins", "left": ""}
    if batches.ready > batches.processed:
        return {"epoch": "within", "left": "batch"}
    if is_validating:
        return {"epoch": "within", "left": "validation"}
    if batches.completed < batches.processed:
        return {"epoch": "within", "left": "end"}
    return {"epoch": "within", "left": "rest" if trainer.validating else ""}


def put_back(trainer: Any, place: Place) -> None:
    """Set every counter of the loops to a place, and let none of them believe that it restarts.

    Args:
        trainer: Its loops hold the counters of a checkpoint, or were put back before.
        place: Where that was saved.
    """
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for one in (fit_loop, loop, loop.val_loop, loop.automatic_optimization, loop.manual_optimization):
        one._restarting = one._loaded_from_state_dict = False
    is_within = place["epoch"] == "within"
    for count in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        count.completed = count.processed
        count.ready = count.started = count.processed + is_within
    if not is_within:
        return
    for count in (loop.batch_progress.total, loop.batch_progress.current):
        count.ready = count.started = count.completed = count.processed
    steps = loop.automatic_optimization.optim_progress.optimizer
    for progress in (steps.step, steps.zero_grad, loop.manual_optimization.optim_step_progress):
        progress.total.reset_on_restart()
        progress.current.reset_on_restart()
    if place["left"] == "batch":  # as the last one of its epoch it would not be run again
        loop.batch_progress.is_last_batch = False
    if place["left"] == "validation":
        total, current = loop.val_loop.batch_progress.total, loop.val_loop.batch_progress.current
        for name, number in vars(current).items():
            setattr(total, name, getattr(total, name) - number)
        loop.val_loop.batch_progress.reset_on_run()


def finish_batch(trainer: Any, place: Place, fetcher: Any) -> None:
    """Do what comes after the last batch: a validation that is due, schedulers on a plateau, its count for loggers."""
    if place["left"] in ("end", "validation", "rest"):
        loop = trainer.fit_loop.epoch_loop
        loop._skip_next_val = place["left"] == "rest"
        loop.on_advance_end(fetcher)


def finish_epoch(trainer: Any) -> None:
    """Step the schedulers on a plateau, which Lightning does after it has called the hooks of an epoch's end."""
    epochs = trainer.fit_loop.epoch_progress.current
    epochs.completed -= 1  # they count from it
    if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epochs.completed += 1
