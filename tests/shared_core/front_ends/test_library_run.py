"""What the callbacks for other libraries share: finished files, receipts, checkpoints, and a model restored."""

import json

import pytest
import torch
from torch import nn

from shared_core.errors import CompatibilityError
from shared_core.front_ends import library_run
from shared_core.front_ends.library_run import LibraryRun

STEPS = 8
PRUNE = {"prune": {"sparsity": 0.75, "end": 4}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def started(recipe, resumed=None):
    model = net()
    run = LibraryRun(recipe, "mine", lambda: (model(batch(step)) for step in range(99)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.start(model, optimizer, total_steps=STEPS, resumed=resumed)
    return run, model, optimizer


def train(run, model, optimizer, steps):
    for _ in range(steps):
        run.session.loss(model(batch(run.session.step)).square().mean()).backward()
        run.session.before_step()
        optimizer.step()
        run.session.after_step()
        optimizer.zero_grad()


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    "recipe",
    [PRUNE, {"qat": {"scheme": "int8"}}, {"lora": {"rank": 2, "save": "merged"}}, {"average": {"kind": "swa"}}],
    ids=lambda recipe: next(iter(recipe)),
)
def test_a_resumed_run_ends_like_the_whole_one(tmp_path, recipe):
    run, model, optimizer = started(recipe)
    train(run, model, optimizer, 5)
    run.save(tmp_path / "state.pt", epoch=3)
    train(run, model, optimizer, 3)
    run.finish(tmp_path)
    resumed, other, optimizer = started(recipe, tmp_path / "state.pt")
    train(resumed, other, optimizer, 3)
    resumed.finish(tmp_path)
    same(other.state_dict(), model.state_dict())


def test_two_models_leave_two_receipts_and_each_names_its_files(tmp_path):
    for name, sparsity in (("one.pth", 0.75), ("two.pth", 0.5)):
        run, model, optimizer = started({"prune": {"sparsity": sparsity, "end": 4}})
        train(run, model, optimizer, 6)
        with run.publishing(), run.publishing():
            saved = {key: value.clone() for key, value in model.state_dict().items()}
        run.saved(name)
        assert int((saved["0.weight"] == 0).sum()) + int((saved["2.weight"] == 0).sum()) == sparsity * 320
        train(run, model, optimizer, 2)
        run.finish(tmp_path)
        run.saved("later.pth")
    first, second = (json.loads((tmp_path / f"eff_receipt{end}.json").read_text()) for end in ("-1", ""))
    assert (first["recipe"]["prune"]["sparsity"], second["recipe"]["prune"]["sparsity"]) == (0.75, 0.5)
    assert "one.pth holds finished weights of step 6" in first["notes"]
    assert "two.pth holds finished weights of step 6" in second["notes"]
    assert not any("one.pth" in note or "later" in note for note in second["notes"])


def test_models_from_before_the_target_do_not_count_as_the_best():
    run, model, optimizer = started(PRUNE)
    told = []
    for _ in range(4):
        train(run, model, optimizer, 2)
        told.append(run.forgets_best())
    assert told == [True, True, False, False]  # compared after the steps 2, 4, 6 and 8
    run.cut_short()


def test_ranges_of_an_average_come_from_the_trainers_batches(tmp_path):
    run, model, optimizer = started({"average": {"kind": "ema"}, "qat": {"scheme": "int8"}})
    train(run, model, optimizer, STEPS)
    run.finish(tmp_path)
    assert (tmp_path / "eff_deployment.json").is_file()
    assert max(len(row.unique()) for row in model[0].weight) <= 255


def test_an_error_restores_model_and_methods(tmp_path):
    class Library:
        def save(self):
            return "saved"

    run, model, optimizer = started({"lora": {"rank": 2}})
    library = Library()
    run.wrap(library, save=lambda save: f"more than {save()}")
    assert library.save() == "more than saved"
    train(run, model, optimizer, 2)
    run.session.swaps.begin_evaluation()
    run.cut_short()
    assert library.save() == "saved"
    assert [type(one) for one in model] == [type(one) for one in net()]
    assert not run.session.receipt()["finished"]


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(library_run, "world_size", lambda: 2)
    with pytest.raises(CompatibilityError, match="mine: several processes are not supported; train in one process"):
        started(PRUNE)
