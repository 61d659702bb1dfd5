"""`efftrain.fastai` in fastai's own Learner. Files are recounted by this file's own code."""

import functools
import json
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("fastai", reason='fastai is not installed here: nox -s "libraries(fastai)"')

from fastai.callback import core
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import lr_find  # noqa: F401 - adds it to Learner
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD, Adam, Optimizer, OptimWrapper, ranger

from efftrain import training
from efftrain.fastai import EffCallback
from shared_core.errors import CheckpointError, CompatibilityError

TORCH = functools.partial(OptimWrapper, opt=torch.optim.AdamW)
BATCHES, STEPS = 12, 36
RECIPES = {
    "prune": {"prune": {"sparsity": 0.75, "end": 0.5}},
    "qat": {"qat": {"scheme": "int4_weight"}},
    "average": {"average": {"kind": "ema"}},
    "lora": {"lora": {"rank": 2, "save": "merged"}},
    "low_rank": {"low_rank": {"rank": 2, "min_size": 1, "merge": True}},
}


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 2))


def items():
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
    return [(one, (one[0] > 0).long()) for one in x]


def learner(path, recipe=None, *, opt_func=Adam, cbs=(), **options):
    data = DataLoaders(DataLoader(items(), bs=8), DataLoader(items()[:32], bs=8), path=path, device="cpu")
    callbacks = [*cbs, *([] if recipe is None else [EffCallback(recipe, **options)])]
    return Learner(data, net(), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, cbs=callbacks)


def fit(learn, epochs=3, lr=0.01, **options):
    with learn.no_logging():
        learn.fit_one_cycle(epochs, lr, **options)
    return learn


def saved(path, name="model"):
    return torch.load(path / "models" / f"{name}.pth", weights_only=True)


def receipts(path):
    files = sorted(path.glob("models/eff_receipt*.json"))
    return {file.name: json.loads(file.read_text()) for file in files}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def zeros(state):
    return sum(int((state[f"{at}.weight"] == 0).sum()) for at in (0, 3))


def most_values(weight):
    return max(len(row.unique()) for row in weight)


@pytest.mark.parametrize("opt_func", [Adam, TORCH], ids=["native", "torch"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_saved_file_and_the_model_are_finished(tmp_path, name, opt_func):
    learn = fit(learner(tmp_path, RECIPES[name], opt_func=opt_func, cbs=[SaveModelCallback(), GradientClip(1.0)]))
    state = learn.model.state_dict()
    same(saved(tmp_path), state)
    assert [type(one) for one in learn.model] == [type(one) for one in net()]
    if name == "low_rank":
        assert int(torch.linalg.matrix_rank(state["0.weight"])) == 2
    assert type(learn.opt) is (Optimizer if opt_func is Adam else OptimWrapper)
    (receipt,) = receipts(tmp_path).values()
    assert receipt["finished"]
    assert receipt["steps"] == {"applied": STEPS, "skipped": 0, "planned": STEPS}
    assert any(note.startswith("model.pth holds finished weights of step ") for note in receipt["notes"])
    if name == "prune":
        assert zeros(state) == round(0.75 * (16 * 40 + 40 * 2))
    if name == "qat":  # 40 inputs of the last layer share scales of their group
        assert most_values(state["0.weight"]) <= 16
        assert most_values(state["3.weight"]) <= 32
    fresh = learner(tmp_path)
    fresh.load("model")
    same(fresh.model.state_dict(), state)


def test_without_a_recipe_the_native_optimizer_trains_the_same_model(tmp_path):
    plain = fit(learner(tmp_path, cbs=[GradientClip(1)]), wd=0.1)
    ours = fit(learner(tmp_path, {}, cbs=[GradientClip(1)]), wd=0.1)
    same(ours.model.state_dict(), plain.model.state_dict())
    one, other = ours.opt.state_dict(), plain.opt.state_dict()
    assert one["hypers"] == other["hypers"]
    for mine, its in zip(one["state"], other["state"], strict=True):
        assert mine.keys() == its.keys()
        for key, value in its.items():
            assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", [*RECIPES, "distill"])
def test_the_weights_are_those_of_a_loop_of_ones_own(tmp_path, name):
    recipe = {"distill": {"teacher": net(2)}} if name == "distill" else RECIPES[name]
    learn = learner(tmp_path, recipe, opt_func=functools.partial(OptimWrapper, opt=torch.optim.SGD))
    with learn.no_logging():
        learn.fit(2, 0.05)
    model, batches = net(), list(DataLoader(items(), bs=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with training(recipe, model, optimizer, total_steps=2 * BATCHES, steps_per_epoch=BATCHES) as loop:
        for x, y in batches * 2:
            with loop.forward():
                loss = nn.functional.cross_entropy(model(x), y)
            loop.backward(loss)
            loop.step()
            optimizer.zero_grad()
    same(learn.model.state_dict(), model.state_dict())


def test_accumulated_batches_are_one_step(tmp_path):
    fit(learner(tmp_path, RECIPES["prune"], cbs=[GradientAccumulation(16)]), 2)
    (receipt,) = receipts(tmp_path).values()
    assert receipt["steps"] == {"applied": BATCHES, "skipped": 0, "planned": BATCHES}


def test_techniques_see_gradients_before_they_are_clipped(tmp_path, monkeypatch):
    learn, norms = learner(tmp_path, RECIPES["prune"], cbs=[GradientClip(1e-3)]), []
    session = learn.eff.eff.session
    before_step = session.before_step

    def recorded():
        norms.append(float(torch.stack([one.grad.norm() for one in learn.model.parameters()]).norm()))
        before_step()

    monkeypatch.setattr(session, "before_step", recorded)
    fit(learn, 1)
    assert len(norms) == BATCHES
    assert min(norms) > 1e-2


def test_a_step_that_a_scaler_skips_is_counted_as_skipped(tmp_path):
    class Overflow(core.Callback):
        order = MixedPrecision.order

        def before_step(self):
            if self.train_iter == 3:
                raise core.CancelStepException

    fit(learner(tmp_path, RECIPES["prune"], cbs=[Overflow()]))
    (receipt,) = receipts(tmp_path).values()
    assert receipt["steps"] == {"applied": STEPS - 1, "skipped": 1, "planned": STEPS}


def test_validation_sees_the_average(tmp_path):
    learn = fit(learner(tmp_path, RECIPES["average"]))
    learn.model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(learn.model(x), y) for x, y in DataLoader(items()[:32], bs=8)]
    assert learn.recorder.values[-1][1] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_the_best_model_is_one_with_all_zeros(tmp_path):
    # Without training the dense model of the first epoch has the lowest loss.
    fit(learner(tmp_path, {"prune": {"sparsity": 0.9, "end": 0.9}}, cbs=[SaveModelCallback()]), lr=1e-9)
    assert zeros(saved(tmp_path)) == round(0.9 * 720)


def test_an_error_leaves_the_users_model_and_learner(tmp_path):
    class Fails(core.Callback):
        def after_batch(self):
            if self.train_iter == 5:
                raise ZeroDivisionError("stop")

    learn = learner(tmp_path, RECIPES["lora"], cbs=[Fails()])
    with pytest.raises(ZeroDivisionError):
        fit(learn)
    assert [type(one) for one in learn.model] == [type(one) for one in net()]
    assert type(learn.opt) is Optimizer
    assert "save" not in vars(learn)
    assert "_with_events" not in vars(learn)
    assert not receipts(tmp_path)
    learn.remove_cb(Fails)
    fit(learn, reset_opt=True)
    (receipt,) = receipts(tmp_path).values()
    assert receipt["finished"]


def test_a_fit_that_another_callback_stopped_at_its_start_is_forgotten(tmp_path):
    class Refuses(core.Callback):
        order = 70

        def before_fit(self):
            raise ZeroDivisionError("not yet")

    learn = learner(tmp_path, RECIPES["prune"], cbs=[Refuses()])
    with pytest.raises(ZeroDivisionError):
        fit(learn)
    learn.remove_cb(Refuses)
    fit(learn)
    (receipt,) = receipts(tmp_path).values()
    assert receipt["steps"] == {"applied": STEPS, "skipped": 0, "planned": STEPS}
    assert type(learn.opt) is Optimizer


def test_each_fit_leaves_its_own_receipt(tmp_path):
    learn = fit(fit(learner(tmp_path, RECIPES["prune"]), 1), 2)
    found = receipts(tmp_path)
    assert {name: one["steps"]["applied"] for name, one in found.items()} == {
        "eff_receipt-1.json": BATCHES,
        "eff_receipt.json": 2 * BATCHES,
    }
    # Another model, trained into the same folder.
    fit(learner(tmp_path, {"qat": {"scheme": "int8"}}), 1)
    assert [*receipts(tmp_path)["eff_receipt.json"]["recipe"]] == ["qat"]
    assert len(receipts(tmp_path)) == 3
    assert zeros(learn.model.state_dict()) == 540


@pytest.mark.parametrize("opt_func", [Adam, TORCH], ids=["native", "torch"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "low_rank"])
def test_a_resumed_fit_ends_like_the_whole_one(tmp_path, name, opt_func):
    whole = fit(learner(tmp_path, RECIPES[name], opt_func=opt_func), 4)
    stopped = learner(tmp_path, RECIPES[name], opt_func=opt_func)

    class Stops(core.Callback):
        def before_epoch(self):
            if self.epoch == 2:
                self.learn.save("half")
                raise ZeroDivisionError("stop")

    with pytest.raises(ZeroDivisionError), stopped.added_cbs([Stops()]):
        fit(stopped, 4)
    resumed = fit(learner(tmp_path, RECIPES[name], opt_func=opt_func, resume="half"), 4, start_epoch=2)
    same(resumed.model.state_dict(), whole.model.state_dict())


def test_factors_are_not_resumed(tmp_path):
    learn = learner(tmp_path, RECIPES["low_rank"], resume="model")
    fit(learner(tmp_path, RECIPES["low_rank"], cbs=[SaveModelCallback(with_opt=True)]))
    with pytest.raises(CheckpointError, match=r"model\.eff\.pt: cannot resume .*; train again"):
        fit(learn, start_epoch=1)
    same(learn.model.state_dict(), net().state_dict())


def test_a_learner_is_pickled_with_its_callback_but_without_the_run(tmp_path):
    learn = fit(learner(tmp_path, RECIPES["prune"]))
    loaded = pickle.loads(pickle.dumps(learn))
    same(loaded.model.state_dict(), learn.model.state_dict())
    fit(loaded, 1)
    assert receipts(tmp_path)["eff_receipt.json"]["steps"]["applied"] == BATCHES


def test_lr_find_trains_without_the_recipe(tmp_path):
    learn = learner(tmp_path, RECIPES["prune"])
    with learn.no_logging():
        learn.lr_find(num_it=10, show_plot=False)
    assert zeros(learn.model.state_dict()) == 0
    assert not receipts(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "opt_func", "told"),
    [
        (RECIPES["prune"], ranger, r"Lookahead is not supported.*OptimWrapper, opt=torch\.optim\.AdamW"),
        ({"loss_scale": {"kind": "dynamic"}}, SGD, r"loss_scale: .*efftrain\.training"),
    ],
)
def test_what_cannot_run_is_refused_before_training(tmp_path, recipe, opt_func, told):
    learn = learner(tmp_path, recipe, opt_func=opt_func)
    with pytest.raises(CompatibilityError, match=told):
        fit(learn)
    assert learn.model[0].weight.grad is None
    same(learn.model.state_dict(), net().state_dict())
