"""What each technique logs while training is what docs/reports.md says, at the trainer's own steps, with both."""

import copy
import csv

import pytest
import torch
import torch.nn.functional as F
from language_runs import cut, documents, gradients, llama, padded
from plain_loop import begun_session
from promise_drivers import hf_trainer, run_lightning
from promise_table import TECHNIQUES, recipe_of

from shared_core.engine.checks.compatibility import refusal
from shared_core.engine.registry import REGISTRY, is_in_bar
from shared_core.engine.saving.session_state import load_window_state, window_state

FIGURES = {f"{key}/{name}": one for key in REGISTRY for name, one in REGISTRY[key].config_class.figures.items()}
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


T, ALPHA = 2.0, 0.3


def formula(student, teacher, rows):
    """Task loss and soft term of all rows in one batch, in float64."""
    batch = padded(rows)
    labels = batch["labels"][:, 1:]
    logits = [copy.deepcopy(model).double().eval()(**batch).logits[:, :-1] for model in (student, teacher)]
    ours, theirs = (each[labels != -100].detach() for each in logits)
    p, q = (theirs / T).softmax(-1), (ours / T).log_softmax(-1)
    soft = T**2 * (p * (p.log() - q)).sum(-1).mean()
    return {
        "distill/task_loss": float(F.cross_entropy(ours, labels[labels != -100])),
        "distill/soft_loss": float(soft),
    }


@pytest.mark.parametrize("size", [6, 2, 1])
@pytest.mark.parametrize("front_end", ["bare", "hf", "lightning"])
def test_losses_are_means_of_the_step_whatever_it_is_cut_into(front_end, size, tmp_path):
    # The Trainer averages over the labels of a step, the others over its micro-batches.
    rows = documents() if front_end == "hf" else [row[:3] for row in documents()]
    student, teacher = llama(0), llama(1, 3)
    expected = formula(student, teacher, rows)
    recipe = {"distill": {"teacher": teacher, "temperature": T, "alpha": ALPHA}}
    _, figures = gradients(front_end, student, recipe, cut(rows, size, padded), tmp_path)
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("front_end", ["bare", "hf", "lightning"])
def test_terms_of_features_and_peers_too(front_end, tmp_path):
    rows, student = [row[:3] for row in documents()], llama(0)
    hidden = {"teacher": llama(1, 3), "hidden": ["model.layers.1=model.layers.2"], "temperature_end": 1.0}
    for options in (hidden, {"teacher": "mutual"}):
        whole, parts = (
            gradients(front_end, student, {"distill": {**options, "temperature": T}}, cut(rows, size, padded), tmp_path)
            for size in (6, 2)
        )
        found = {name: value for name, value in whole[1].items() if name.startswith("distill/")}
        assert len(found) >= 3
        assert {name: parts[1][name] for name in found} == pytest.approx(found, rel=1e-5)


def test_figures_of_a_step_that_is_interrupted_go_on():
    torch.manual_seed(0)
    net, data = torch.nn.Linear(4, 3), torch.randn(4, 8, 4)
    recipe = {"distill": {"teacher": torch.nn.Linear(4, 3), "alpha": ALPHA}}

    def begun():
        session, _ = begun_session(recipe, net, 2, lr=1e-3)
        return session

    def train(session, part):
        for batch in part:
            session.loss(F.cross_entropy(net(batch), torch.zeros(8, dtype=torch.long))).backward()

    whole = begun()
    train(whole, data)
    whole.after_step()
    expected = whole.figures()
    whole.detach()
    stopped = begun()
    train(stopped, data[:3])
    window = window_state(stopped)
    stopped.detach()
    resumed = begun()
    load_window_state(resumed, window)
    train(resumed, data[3:])
    resumed.after_step()
    assert resumed.figures() == pytest.approx(expected)
    resumed.detach()
