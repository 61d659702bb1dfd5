"""Whatever a run keeps is of one size, however long it goes on: memory, objects, hooks, handles, state, receipt."""

import collections
import gc
import itertools
import os
import statistics
import threading
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from plain_loop import backward, update
from promise_drivers import CLIP, LoopServices, batches, hf_trainer, run_lightning
from promise_table import TOGETHER, make_net, recipe_of
from torch import Tensor
from transformers import TrainerCallback

from shared_core import Session
from shared_core.engine.observers.history import LIMIT

KEYS = tuple(key for key in TOGETHER if key != "soup")  # which keeps one entry for each checkpoint
SAMPLES = 10
WARM = 4
"""Samples until caches of Python, torch and the trainers are filled."""


def size(value):
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return len(value) + sum(map(size, value.values()))
    return 1 + sum(map(size, value)) if isinstance(value, list | tuple) else 1


def resident_mib():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


class Watch:
    """Looks at a run in even distances."""

    def __init__(self, steps):
        self.steps, self.mib, self.counts, self.kinds = steps, [], [], {}

    def look(self, step, model, optimizer, session):
        if step % (self.steps // SAMPLES):
            return
        gc.collect()
        objects = gc.get_objects()
        if len(self.mib) in (WARM, SAMPLES - 1):
            self.kinds[len(self.mib)] = collections.Counter(str(type(thing)) for thing in objects)
        state, receipt = session.state_dict(), dict(session.receipt().values)
        del state["history"]  # the receipt's points, which are thinned out now and then: of no even size
        points = receipt.pop("history")
        counts = {
            "hooks": sum(
                len(value) for m in model.modules() for key, value in vars(m).items() if key.endswith("hooks")
            ),
            "optimizer hooks": len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks),
            "threads": threading.active_count(),
            "open files": len(os.listdir("/proc/self/fd")),
            "state": size(state),
            "receipt": size(receipt),
            "notes": len(session.notes),
        }
        assert all(len(series) <= LIMIT for series in points.values())
        self.counts.append(counts)
        del objects
        self.mib.append(resident_mib())

    def check(self):
        assert len(self.mib) == SAMPLES
        for name, count in self.counts[-1].items():
            wavers = 1.02 if name in ("state", "receipt") else 1.0  # histograms have the bins that they need
            assert count <= wavers * self.counts[WARM][name], name
        # what grows step by step grows in each tenth of the run; the allocator takes a piece once in a while
        assert statistics.median(after - before for before, after in itertools.pairwise(self.mib[WARM:])) < 0.1, (
            self.mib
        )
        grown = self.kinds[SAMPLES - 1] - self.kinds[WARM]
        between = self.steps * (SAMPLES - 1 - WARM) / SAMPLES
        assert all(number < max(between / 50, 10) for number in grown.values()), grown.most_common(5)


def recipe_for(steps):
    recipe = recipe_of(*KEYS)
    recipe["prune"]["end"] = steps
    return recipe


def bare(steps, watch, folder):
    data, model = batches(1), make_net()
    session = Session(recipe_for(steps), services=LoopServices(model, data))
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.begin([optimizer], total_steps=steps, steps_per_epoch=4)
    for step in range(1, steps + 1):
        with session.forward():
            loss = session.loss(model(**data[step % len(data)])["loss"])
        backward(session, loss)
        update(session, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        watch.look(step, model, optimizer, session)
    session.finish()


def hugging_face(steps, watch, folder):
    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            session = trainer.callback_handler.callbacks[0].session
            watch.look(state.global_step, trainer.model, trainer.optimizer.optimizer, session)

    options = {"max_steps": steps, "save_every": steps // 4, "save_total_limit": 1, "logging_strategy": "no"}
    trainer = hf_trainer(recipe_for(steps), folder, callbacks=[Looks()], **options)
    trainer.train()


def lightning(steps, watch, folder):
    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            session = next(c.session for c in trainer.callbacks if getattr(c, "session", None) is not None)
            watch.look(trainer.global_step, module, trainer.optimizers[0], session)

    run_lightning(recipe_for(steps), folder, max_steps=steps, callbacks=[Looks()])


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        pytest.param(bare, 150, id="bare"),
        pytest.param(bare, 10_000, id="bare-long", marks=pytest.mark.slow),
        pytest.param(hugging_face, 1_500, id="hf", marks=pytest.mark.slow),
        pytest.param(lightning, 1_500, id="lightning", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(7200)
def test_state_receipt_and_memory_do_not_grow(run, steps, tmp_path):
    watch = Watch(steps)
    run(steps, watch, tmp_path)
    watch.check()
