"""`efftrain.skorch` in skorch's own nets. Files are recounted by this file's own code."""

import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("skorch", reason='skorch is not installed here: nox -s "libraries(skorch)"')

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, EarlyStopping, GradientNormClipping
from skorch.helper import predefined_split
from torch.utils.data import TensorDataset

from efftrain import training
from efftrain.skorch import EffCallback
from shared_core.errors import CompatibilityError

X = np.random.default_rng(0).standard_normal((96, 16)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
VALID = TensorDataset(torch.from_numpy(X[:32]), torch.from_numpy(Y[:32]))
BATCHES, EPOCHS = 12, 4
RECIPES = {
    "prune": {"prune": {"sparsity": 0.75, "end": 0.5}},
    "qat": {"qat": {"scheme": "int4_weight"}},
    "average": {"average": {"kind": "ema"}},
    "lora": {"lora": {"rank": 2, "save": "merged"}},
}


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def net(folder, recipe, callbacks=(), kind=NeuralNetClassifier, **options):
    torch.manual_seed(1)
    ours = [] if recipe is None else [EffCallback(recipe, folder)]
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "max_epochs": EPOCHS, "batch_size": 8} | options
    return kind(
        Net, criterion=nn.CrossEntropyLoss, train_split=predefined_split(VALID), verbose=0,
        callbacks=[*ours, *callbacks], **options,
    )  # fmt: skip


def receipts(folder):
    return {file.name: json.loads(file.read_text()) for file in folder.glob("eff_receipt*.json")}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def zeros(state):
    return sum(int((state[f"{name}.weight"] == 0).sum()) for name in ("first", "last"))


@pytest.mark.parametrize("name", [*RECIPES, "distill"])
def test_the_weights_are_those_of_a_loop_of_ones_own(tmp_path, name):
    torch.manual_seed(2)
    recipe = {"distill": {"teacher": Net()}} if name == "distill" else RECIPES[name]
    trained = net(tmp_path, recipe).fit(X, Y)
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(zip(torch.from_numpy(X).split(8), torch.from_numpy(Y).split(8), strict=True))
    with training(recipe, model, optimizer, total_steps=EPOCHS * BATCHES, steps_per_epoch=BATCHES) as loop:
        for x, y in batches * EPOCHS:
            optimizer.zero_grad()
            with loop.forward():
                loss = nn.functional.cross_entropy(model(x), y)
            loop.backward(loss)
            loop.step()
    same(trained.module_.state_dict(), model.state_dict())
    (receipt,) = receipts(tmp_path).values()
    assert receipt["finished"]
    assert receipt["steps"] == {"applied": EPOCHS * BATCHES, "skipped": 0, "planned": EPOCHS * BATCHES}


@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_and_the_best_weights_are_finished(tmp_path, name):
    callbacks = [
        Checkpoint(dirname=str(tmp_path), f_optimizer=None, load_best=True),
        EarlyStopping(load_best=True, patience=99),
        GradientNormClipping(1.0),
    ]
    trained = net(tmp_path, RECIPES[name], callbacks).fit(X, Y)
    state = torch.load(tmp_path / "params.pt", weights_only=True)
    same(state, trained.module_.state_dict())
    assert type(trained.module_.first) is nn.Linear
    if name == "prune":
        assert zeros(state) == round(0.75 * 720)
    if name == "qat":
        assert max(len(row.unique()) for row in state["first.weight"]) <= 15
    (receipt,) = receipts(tmp_path).values()
    assert any(note.startswith("params.pt holds finished weights of step ") for note in receipt["notes"])


def test_the_best_model_is_one_with_all_zeros(tmp_path):
    # Without training the dense model of the first epoch has the lowest loss.
    recipe = {"prune": {"sparsity": 0.9, "end": 0.9}}
    callbacks = [Checkpoint(dirname=str(tmp_path), load_best=True), EarlyStopping(load_best=True, patience=99)]
    trained = net(tmp_path, recipe, callbacks, lr=1e-9).fit(X, Y)
    assert zeros(torch.load(tmp_path / "params.pt", weights_only=True)) == round(0.9 * 720)
    assert zeros(trained.module_.state_dict()) == round(0.9 * 720)


def test_validation_sees_the_average(tmp_path):
    trained = net(tmp_path, RECIPES["average"]).fit(X, Y)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(trained.module_(VALID.tensors[0]), VALID.tensors[1])
    assert trained.history[-1, "valid_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_early_stopping_finishes_the_model(tmp_path):
    trained = net(tmp_path, RECIPES["prune"], [EarlyStopping(patience=1, threshold=1e9)], lr=1e-9).fit(X, Y, epochs=9)
    (receipt,) = receipts(tmp_path).values()
    assert receipt["finished"]
    assert receipt["steps"]["applied"] < receipt["steps"]["planned"] == 9 * BATCHES
    assert type(trained.module_.first) is nn.Linear


def test_a_fit_without_epochs_changes_nothing(tmp_path):
    trained = net(tmp_path, RECIPES["lora"]).fit(X, Y, epochs=0)
    assert type(trained.module_.first) is nn.Linear
    assert not receipts(tmp_path)


def test_an_error_leaves_the_users_net(tmp_path):
    class Fails(Callback):
        def on_batch_end(self, net, training=False, **kwargs):
            if len(net.history[-1, "batches"]) == 5:
                raise ZeroDivisionError

    failing = net(tmp_path, RECIPES["lora"], [Fails()])
    with pytest.raises(ZeroDivisionError):
        failing.fit(X, Y)
    assert type(failing.module_.first) is nn.Linear
    methods = "fit_loop", "get_loss", "train_step_single", "run_single_epoch", "notify", "save_params"
    assert not vars(failing).keys() & {*methods}
    assert not receipts(tmp_path)


def test_each_fit_leaves_its_own_receipt(tmp_path):
    first, second = net(tmp_path, RECIPES["prune"]), net(tmp_path, {"prune": {"sparsity": 0.5}})
    first.fit(X, Y)
    second.fit(X, Y)
    found = {name: one["recipe"]["prune"]["sparsity"] for name, one in receipts(tmp_path).items()}
    assert found == {"eff_receipt-1.json": 0.75, "eff_receipt.json": 0.5}
    assert (zeros(first.module_.state_dict()), zeros(second.module_.state_dict())) == (540, 360)


def test_a_grid_search_leaves_a_receipt_of_each_net(tmp_path):
    search = GridSearchCV(net(tmp_path, RECIPES["prune"]), {"module__width": [32, 40]}, cv=2)
    search.fit(X, Y)
    assert len(receipts(tmp_path)) == 5
    assert zeros(search.best_estimator_.module_.state_dict()) > 0.7 * 18 * search.best_params_["module__width"]


def test_a_net_is_pickled_and_cloned_with_its_callback(tmp_path):
    trained = net(tmp_path, RECIPES["prune"]).fit(X, Y)
    loaded = pickle.loads(pickle.dumps(trained))
    same(loaded.module_.state_dict(), trained.module_.state_dict())
    assert zeros(clone(trained).fit(X, Y).module_.state_dict()) == 540
    assert zeros(loaded.partial_fit(X, Y).module_.state_dict()) == 540


class Accumulates(NeuralNetClassifier):
    def train_step(self, batch, **options):
        return self.train_step_single(batch, **options)


@pytest.mark.parametrize(
    ("options", "callbacks", "told"),
    [
        ({"kind": Accumulates}, [], "its own train_step"),
        ({"compile": True}, [], "compile=True is not supported"),  # torch compiles at the first forward, not yet
        ({}, [Checkpoint(dirname="unused", load_best=True)], "pass f_optimizer=None"),
    ],
)
def test_what_cannot_run_is_refused_before_training(tmp_path, options, callbacks, told):
    refused = net(tmp_path, RECIPES["lora"], callbacks, **options)
    with pytest.raises(CompatibilityError, match=told):
        refused.fit(X, Y)
    assert not receipts(tmp_path)
