"""What each technique logs while training is what docs/logging.md says, at the trainer's own steps, with both."""

import csv

import pytest
from promise_drivers import hf_trainer, run_lightning
from promise_table import TECHNIQUES, recipe_of

from shared_core.engine.compatibility import refusal
from shared_core.engine.metrics import is_in_bar, logged_figures
from shared_core.engine.registry import REGISTRY

FIGURES = logged_figures()
EVERY = 3  # of 8 steps
# the fewest runs that hold every technique
RUNS: list[list[str]] = []
for _key, _row in TECHNIQUES.items():
    for _run in RUNS:
        if not any(refusal(_key, other) or TECHNIQUES[other].in_16_bit != _row.in_16_bit for other in _run):
            _run.append(_key)
            break
    else:
        RUNS.append([_key])


def hugging_face(keys, folder):
    trainer = hf_trainer(recipe_of(*keys), folder, logging_steps=EVERY, save_every=4)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if set(entry) & set(FIGURES)]
    assert all("loss" in entry for entry in entries)
    return {entry["step"]: set(entry) & set(FIGURES) for entry in entries}, None


def lightning(keys, folder):
    import pytorch_lightning as pl

    shown = set()

    class Bar(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            shown.update(trainer.progress_bar_metrics)

    logger = pl.loggers.CSVLogger(folder, flush_logs_every_n_steps=1)
    run_lightning(recipe_of(*keys), folder, logger=logger, log_every_n_steps=EVERY, callbacks=[Bar()])
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [(int(row["step"]) + 1, {name for name in FIGURES if row.get(name)}) for row in csv.DictReader(file)]
    found = [(step, names) for step, names in rows if names]
    assert len(found) == len(dict(found))  # none twice
    return dict(found), shown


@pytest.mark.parametrize("keys", RUNS, ids="-".join)
@pytest.mark.parametrize("run", [hugging_face, lightning], ids=lambda run: run.__name__)
def test_a_technique_logs_what_the_table_says_when_the_trainer_logs(run, keys, tmp_path):
    logged, in_bar = run(keys, tmp_path)
    expected = {name for name, figure in FIGURES.items() if name.partition("/")[0] in keys and not figure.only}
    assert expected or all(REGISTRY[key].config_class.logs_nothing for key in keys)
    assert set(logged) == ({EVERY, 2 * EVERY} if expected else set())
    assert all(names == expected for names in logged.values())
    if in_bar is not None:
        assert in_bar & set(FIGURES) == {name for name in expected if is_in_bar(name)}


def test_every_technique_is_known_to_log_or_not_to():
    logging = {name.partition("/")[0] for name in FIGURES}
    silent = {key for key, one in REGISTRY.items() if one.config_class.logs_nothing}
    assert logging | silent == set(REGISTRY)
    assert not logging & silent
    assert all(sum(name.startswith(f"{key}/") and is_in_bar(name) for name in FIGURES) <= 2 for key in REGISTRY)
