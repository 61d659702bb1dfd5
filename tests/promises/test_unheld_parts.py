"""A part of the model that no optimizer holds stays as it is, bit for bit, and is named."""

import functools

import promise_drivers
import pytest
import torch
from plain_loop import plain_step
from promise_drivers import difference, run_accelerate, run_bare, run_fabric, run_lightning
from promise_table import TECHNIQUES, VARIANTS, DigitsNet, recipe_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared_core import Session
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.errors import CompatibilityError, MatchError

RUNS = {
    "bare": lambda recipe, folder: run_bare(recipe),
    "optimizer-first": lambda recipe, folder: run_bare(recipe, optimizer_first=True),
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "fabric": run_fabric,
}
# A ticket holds the weights of all parts, and a soup those of all checkpoints.
KEYS = [key for key in (TECHNIQUES | VARIANTS) if key != "soup" and not key.startswith("ticket")]


class HelpedNet(DigitsNet):
    """Adds to its logits what a part does that trains neither by `requires_grad` nor by any optimizer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.helper = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))

    def forward(self, x, labels=None):
        found = super().forward(x.to(self.conv.weight.dtype), labels)
        helped = self.helper(x.to(self.conv.weight.dtype).flatten(1))
        if labels is not None:
            found["loss"] = found["loss"] + nn.functional.cross_entropy(helped, labels)
        return found


@pytest.fixture
def helped(monkeypatch):
    """Have runs train a `HelpedNet`, with an optimizer without its helper; return the nets that were made."""
    made = []

    def make_net(dropout=0.0, *, seed=0, batch_norm=True, recipe=()):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = HelpedNet(dropout, batch_norm=batch_norm and all(TECHNIQUES[key].takes_batch_norm for key in recipe))
        made.append(net.bfloat16() if any(TECHNIQUES[key].in_16_bit for key in recipe) else net)
        return made[-1]

    def optimizer_of(others, name, parameters):
        spare = {id(parameter) for parameter in made[-1].helper.parameters()}
        return others(name, [parameter for parameter in parameters if id(parameter) not in spare])

    monkeypatch.setattr(promise_drivers, "make_net", make_net)
    monkeypatch.setattr(promise_drivers, "_optimizer", functools.partial(optimizer_of, promise_drivers._optimizer))
    return made


@pytest.mark.parametrize("front_end", RUNS)
@pytest.mark.parametrize("key", KEYS)
def test_what_no_optimizer_holds_stays_bit_for_bit_and_is_named(key, front_end, helped, tmp_path):
    recipe = recipe_of(key)
    result = RUNS[front_end](recipe, tmp_path)
    before = promise_drivers.make_net(recipe=recipe).helper.state_dict()
    assert difference(before, result.model.helper.cpu().state_dict()) is None
    told = [note for note in result.receipt["notes"] if note.startswith("no optimizer holds the parameters of ")]
    assert len(told) == 1
    assert "helper: all techniques treat them as frozen" in told[0]
    for reached in result.receipt["coverage"].values():
        assert reached["beside"]["frozen weights"] == 64 * 96 + 96 * 10


@pytest.mark.parametrize("key", ["prune", "qat", "fp8", "low_rank", "lora"])
def test_a_resumed_run_leaves_the_same_part_alone(key, helped, tmp_path):
    recipe = recipe_of(key)
    whole = run_lightning(recipe, tmp_path / "whole", save_every=2)
    again = run_lightning(recipe, tmp_path / "again", save_every=2, resume=whole.checkpoints[4])
    assert difference(whole.weights, again.weights) is None
    assert again.receipt["coverage"] == whole.receipt["coverage"]


def averaged(**options):
    """Return a model that holds a moving average of its net, as users' code does, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model.ema = AveragedModel(model.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return model, Session(options), lambda: torch.optim.SGD(model.net.parameters(), lr=0.1)


def train(session, model, optimizer, steps):
    for _ in range(steps):
        plain_step(session, optimizer, model.net(torch.randn(8, 16)).square().mean())
        model.ema.update_parameters(model.net)


def test_scores_of_a_moving_average_take_no_part_in_pruning():
    model, session, make_optimizer = averaged(
        prune={"sparsity": 0.5, "begin": 1, "end": 2, "every": 1, "criterion": "taylor"}
    )
    session.attach(model)
    optimizer = make_optimizer()
    session.begin([optimizer], total_steps=4)
    train(session, model, optimizer, 4)
    session.finish()
    weights = [parameter for parameter in model.net.parameters() if parameter.ndim > 1]
    assert sum(int((weight == 0).sum()) for weight in weights) == sum(weight.numel() for weight in weights) // 2


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("recipe", [{"low_rank": {"rank": 2, "min_size": 0, "skip": []}}], ids=["low_rank"])
def test_a_copy_keeps_the_structure_of_its_original_so_that_it_can_follow(recipe, early):
    model, session, make_optimizer = averaged(**recipe)
    if early:
        optimizer = make_optimizer()
        attach_with(session, model, [optimizer])
    else:
        session.attach(model)
        optimizer = make_optimizer()
    session.begin([optimizer], total_steps=2)
    reference = [value.detach().clone() for value in model.net.parameters()]
    for step in range(2):
        train(session, model, optimizer, 1)
        now = [value.detach().clone() for value in model.net.parameters()]
        reference = now if step == 0 else [0.5 * old + 0.5 * new for old, new in zip(reference, now, strict=True)]
    for found, expected in zip(model.ema.module.parameters(), reference, strict=True):
        torch.testing.assert_close(found, expected)
    session.finish()


@pytest.mark.parametrize(
    "recipe",
    [{"qat": {"scheme": "int8", "range": "lsq"}}, {"lora": {"rank": 2, "base": "none", "train": ["net.0"]}}],
    ids=lambda recipe: next(iter(recipe)),
)
def test_a_copy_that_could_not_follow_is_refused_by_name(recipe):
    model, session, make_optimizer = averaged(**recipe)
    session.attach(model)
    with pytest.raises(CompatibilityError, match=r"ema.*average"):
        session.begin([make_optimizer()], total_steps=2)


@pytest.mark.parametrize("recipe", [{"prune": {"sparsity": 0.5}}, {"cluster": {"bits": 2, "min_size": 0}}])
def test_a_technique_that_reaches_nothing_held_is_refused(recipe):
    model = nn.ModuleDict({"net": nn.Linear(8, 8), "scale": nn.LayerNorm(8)})
    session = Session(recipe)
    session.attach(model)
    with pytest.raises(MatchError, match="no optimizer"):
        session.begin([torch.optim.SGD(model["scale"].parameters(), lr=0.1)], total_steps=10)


@pytest.mark.parametrize(("how", "named"), [("joins", "ema.module.0.weight and 3 more"), ("thaws", "net.2.weight and")])
def test_a_parameter_that_trains_only_later_is_named(how, named):
    model, session, make_optimizer = averaged(prune={"sparsity": 0.5, "begin": 1, "end": 2, "every": 1})
    model.net[2].requires_grad_(how == "joins")
    session.attach(model)
    optimizer = make_optimizer()
    session.begin([optimizer], total_steps=4)
    train(session, model, optimizer, 2)
    assert not any(named in note for note in session.notes)
    if how == "joins":
        optimizer.add_param_group({"params": [*model.ema.parameters()]})
    model.net[2].requires_grad_()
    train(session, model, optimizer, 2)
    session.finish()
    assert any(note.startswith(named) for note in session.notes)
