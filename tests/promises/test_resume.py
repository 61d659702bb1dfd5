"""Exact resume: stopped anywhere and resumed is bit for bit the run that never stopped."""

import itertools
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from promise_drivers import (
    STOPS,
    TRAINERS,
    assert_resumes,
    copied,
    difference,
    run_accelerate,
    run_fabric,
    run_hf,
    run_lightning,
    saved_state,
    told,
)
from promise_table import EVERYTHING, FEW_RUNS, NUM_STEPS, TOGETHER, VARIANTS, recipe_of
from two_ranks import run_scripts

from shared_core.engine.saving.state_file import load_state

FRESH = Path(__file__).parents[1] / "support" / "fresh_run.py"
IN_MATRIX = pytest.mark.matrix
ROWS = [*((key,) for key in [*EVERYTHING, *VARIANTS]), TOGETHER]


def in_turn(front_end, shift):
    """Each row with three of the stops, others for each row and front end; with the other two in `make test-all`."""
    for i, keys in enumerate(ROWS):
        name = "+".join(keys) if len(keys) < 3 else "all"
        turned = [STOPS[(i + shift + k) % len(STOPS)] for k in range(len(STOPS))]
        marks = IN_MATRIX if keys in FEW_RUNS else ()
        yield pytest.param(front_end, keys, sorted(turned[:3]), id=f"{front_end}-{name}", marks=marks)
        yield pytest.param(front_end, keys, sorted(turned[3:]), id=f"{front_end}-{name}-more", marks=pytest.mark.slow)


@pytest.mark.parametrize(("front_end", "keys", "stops"), [*in_turn("hf", 0), *in_turn("lightning", 2)])
def test_a_trainer_resumes_bit_for_bit(front_end, keys, stops, tmp_path):
    options = {"dropout": 0.3, "shuffle": True}
    assert_resumes(TRAINERS[front_end], lambda: recipe_of(*keys), tmp_path, stops, **options)


WITHOUT_SOUP = tuple(key for key in TOGETHER if key != "soup")


@pytest.mark.parametrize(
    ("keys", "batch"),
    [*((WITHOUT_SOUP, batch) for batch in (1, 3, 8, 11)), *((("dp",), batch) for batch in (3, 11))],
    ids=lambda value: f"batch{value}" if isinstance(value, int) else "all" if value is WITHOUT_SOUP else value[0],
)
def test_lightning_resumes_inside_an_accumulation_window(keys, batch, tmp_path):
    def run(folder, **more):
        torch.manual_seed(3)
        options = {"dropout": 0.3, "shuffle": True, "accumulate": 2}
        return run_lightning(recipe_of(*keys), tmp_path / folder, save_at_batches=(batch, 16), **options, **more)

    whole = run("whole")
    again = run("again", resume=whole.checkpoints[batch])
    assert difference(saved_state(whole.checkpoints[16]), saved_state(again.checkpoints[16])) is None
    assert difference(whole.weights, again.weights) is None


LOOPS = {"accelerate": (run_accelerate, {"soup"}), "fabric": (run_fabric, {"soup"})}


@pytest.mark.parametrize(
    ("loop", "keys"),
    [
        pytest.param(
            loop,
            tuple(key for key in keys if key not in refused),
            marks=IN_MATRIX if keys in FEW_RUNS else (),
        )
        for loop, (_, refused) in LOOPS.items()
        for keys in (*((key,) for key in EVERYTHING if key not in refused), TOGETHER)
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value,
)
def test_a_loop_of_ones_own_resumes_bit_for_bit_also_inside_a_window(loop, keys, tmp_path):
    # In the middle of an epoch a loop draws other batches and random numbers than the run that went on.
    train, _ = LOOPS[loop]
    for name, stops, options in (
        ("within", (1, 3, 11), {"accumulate": 2}),
        ("edge", (4,), {"dropout": 0.3, "shuffle": True}),
    ):

        def run(folder, options=options, stops=stops, **more):
            torch.manual_seed(3)
            last = NUM_STEPS * options.get("accumulate", 1)
            return train(recipe_of(*keys), folder, save_at_batches=(*stops, last), **options, **more)

        whole = run(tmp_path / name)
        for stop in stops:
            again = run(tmp_path / f"{name}{stop}", resume=whole.checkpoints[stop])
            assert difference(whole.weights, again.weights) is None, stop
            if loop == "accelerate":  # Fabric's file behind the last step is that of the finished model
                ends = [load_state(each.checkpoints[max(each.checkpoints)]) for each in (whole, again)]
                assert difference(*ends) is None, stop


INSIDE = ["*norm", "*dropout", "*hidden"]
# Options that count or find what a receipt tells, and that no row of the table has.
COUNTED = {
    "average-norms": {"average": {"kind": "swa", "begin": 2, "bn_batches": 2}},
    "average-late": {"average": {"kind": "last_k", "k": 2, "begin": 5}},
    "checkpointing-least": {"checkpointing": {"policy": "budget:least", "include": INSIDE}},
    "checkpointing-selective": {"checkpointing": {"policy": "selective", "include": INSIDE}},
    "fp8-rowwise": {"fp8": {"recipe": "rowwise", "include": ["first"]}},
    "loss_scale-watched": {"loss_scale": {"kind": "enhanced", "telemetry_every": 2, "histogram_every": 3}},
    "low_rank-scaled": {"low_rank": {"rank": 4, "decomposition": "scaled", "calibration_batches": 2}},
    "low_rank-whitened": {"low_rank": {"rank": 4, "decomposition": "whitened", "merge": True}},
    "primary-watched": {"primary_weights": {"kind": "kahan", "telemetry_every": 2}},
    "prune-wanda": {"prune": {"criterion": "wanda", "sparsity": 0.5, "begin": 1, "end": 6, "every": 2}},
    "qat-mse": {"qat": {"scheme": "int8", "range": "mse", "begin": 2}},
}
RECEIPTS = {
    "hf": (run_hf, {"save_every": 1, "seed": 3, "eval_strategy": "steps", "eval_steps": 2}),
    "lightning": (run_lightning, {"save_every": 1, "limit_val_batches": 2, "val_check_interval": 2}),
    **{loop: (run, {"save_at_batches": (3, NUM_STEPS)}) for loop, (run, _) in LOOPS.items()},
}


@pytest.mark.parametrize(
    ("name", "front_end"),
    [
        (name, front_end)
        for name, front_end in itertools.product([*EVERYTHING, *VARIANTS, *COUNTED], RECEIPTS)
        if front_end not in LOOPS or name not in LOOPS[front_end][1]
    ],
)
def test_a_receipt_is_that_of_the_run_that_never_stopped(name, front_end, tmp_path):
    train, options = RECEIPTS[front_end]

    def run(folder, **more):
        torch.manual_seed(3)
        return train(COUNTED.get(name) or recipe_of(name), tmp_path / folder, **options, **more)

    whole = run("whole")
    resume = copied(whole, 3, tmp_path / "again") if front_end in ("hf", "lightning") else whole.checkpoints[3]
    again = run("again", resume=resume)
    assert difference(told(whole.receipt, tmp_path / "whole"), told(again.receipt, tmp_path / "again")) is None


class AfterValidation(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_validation_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"validated={trainer.global_step}.ckpt")


@pytest.mark.parametrize("name", ["step={}.ckpt", "validated={}.ckpt"])
def test_lightning_resumes_where_validation_comes_after_or_before_the_checkpoint(name, tmp_path):
    def run(folder, **more):
        torch.manual_seed(3)
        options = {"dropout": 0.3, "shuffle": True, "save_every": 1, "limit_val_batches": 2, "val_check_interval": 2}
        callbacks = [AfterValidation(tmp_path / folder)]
        return run_lightning(recipe_of("average"), tmp_path / folder, callbacks=callbacks, **options, **more)

    whole = run("whole")
    for stop in (2, 4, 6):
        again = run(f"from{stop}", resume=tmp_path / "whole" / name.format(stop))
        assert difference(saved_state(whole.checkpoints[8]), saved_state(again.checkpoints[8])) is None, stop
        assert difference(whole.weights, again.weights) is None


class OnPlateau(pl.Callback):
    """Gives the run a scheduler that goes by a metric, after every `frequency` batches."""

    def __init__(self, monitor, frequency):
        self.monitor, self.frequency = monitor, frequency

    def setup(self, trainer, module, stage):
        configure = module.configure_optimizers

        def with_scheduler():
            optimizer = configure()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.5)
            told = {"interval": "step", "monitor": self.monitor, "frequency": self.frequency, "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **told}}

        module.configure_optimizers = with_scheduler

    def on_before_backward(self, trainer, module, loss):
        module.log("loss", loss.detach())


@pytest.mark.parametrize(("monitor", "frequency"), [("loss", 1), ("eval_loss", 2)])
def test_lightning_resumes_a_scheduler_on_a_plateau_that_had_yet_to_step(monitor, frequency, tmp_path):
    def run(folder, **more):
        callbacks = [OnPlateau(monitor, frequency), AfterValidation(tmp_path / folder)]
        options = {"save_every": 1, "limit_val_batches": 2, "val_check_interval": 2, **more}
        return run_lightning(recipe_of("average"), tmp_path / folder, callbacks=callbacks, **options)

    whole = run("whole")
    for name in ("step=2", "step=3", "validated=2", "step=5"):
        again = run(f"from {name}", resume=tmp_path / "whole" / f"{name}.ckpt")
        ends = [
            torch.load(each.checkpoints[8], weights_only=True)["lr_schedulers"][0]["last_epoch"]
            for each in (whole, again)
        ]
        assert ends[0] == ends[1] > 2, name
        assert difference(whole.weights, again.weights) is None, name


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_a_fresh_process_resumes_bit_for_bit(front_end, tmp_path):
    def run(folder, resume=None):
        folder.mkdir()
        run_scripts([([FRESH, front_end, folder, *([resume] if resume else [])], {})], folder)

    name = "checkpoint-{}" if front_end == "hf" else "step={}.ckpt"
    run(tmp_path / "whole")
    run(tmp_path / "again", tmp_path / "whole" / name.format(3))
    last = name.format(NUM_STEPS)
    assert difference(saved_state(tmp_path / "whole" / last), saved_state(tmp_path / "again" / last)) is None
