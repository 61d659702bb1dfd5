"""`training`: a plain loop whose optimizer exists before the techniques do."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from promise_drivers import difference, run_bare
from promise_table import TECHNIQUES, recipe_of
from torch import nn

from shared_core import Session, training
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.services import Services
from shared_core.errors import CompatibilityError, TrainingError

PRUNE = {"prune": {"sparsity": 0.5, "end": 2}}
ADDING = {"lora": {"rank": 2, "base": "none", "save": "merged"}, "qat": {"scheme": "int8", "range": "lsq", "begin": 0}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def sgd(model):
    return torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}], momentum=0.9
    )


def held(optimizer):
    return [group["params"] for group in optimizer.param_groups]


def steps(loop, model, count):
    for _ in range(count):
        loop.backward(model(torch.ones(2, 16)).square().mean())
        loop.step()
        loop.optimizer.zero_grad()


@pytest.mark.parametrize("key", [*(key for key in TECHNIQUES if key != "soup"), "lora-qat-lsq"])
def test_an_optimizer_that_was_made_first_trains_the_same(key):
    first = run_bare(recipe_of(key), optimizer_first=True)
    assert difference(first.weights, run_bare(recipe_of(key)).weights) is None


def test_the_block_finishes_the_model_and_gives_the_optimizer_the_users_parameters_back():
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with training(ADDING, model, optimizer, total_steps=3) as loop:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {*map(id, trained)} == {id(one) for group in held(optimizer) for one in group}
        matrices = dict(model.named_parameters())
        assert any(one is matrices["0.lora_A.default.weight"] for one in held(optimizer)[0])
        steps(loop, model, 3)
        scheduler.step()
    assert loop.session.is_finished
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [[id(one) for one in group] for group in held(optimizer)] == [
        [id(one) for one in model[index].parameters()] for index in (0, 2)
    ]
    assert {*optimizer.state} <= {*model.parameters()}


def test_what_the_script_adds_to_the_optimizer_in_training_stays_there():
    model, own = net(), nn.Parameter(torch.ones(2))
    optimizer = sgd(model)
    with training(ADDING, model, optimizer, total_steps=2) as loop:
        steps(loop, model, 1)
        optimizer.add_param_group({"params": [own]})
        own.grad = torch.ones(2)
        steps(loop, model, 1)
    assert [len(group) for group in held(optimizer)] == [2, 2, 1]
    assert held(optimizer)[2][0] is own
    assert own in optimizer.state


@pytest.mark.parametrize("recipe", [PRUNE, ADDING], ids=["prune", "lora-qat"])
def test_an_error_leaves_the_model_as_the_users(recipe):
    model = net()
    optimizer, keys = sgd(model), list(model.state_dict())
    with pytest.raises(ZeroDivisionError), training(recipe, model, optimizer, total_steps=4) as loop:
        steps(loop, model, 1)
        raise ZeroDivisionError
    assert not loop.session.is_attached
    assert list(model.state_dict()) == keys
    assert [len(group) for group in held(optimizer)] == [2, 2]
    with training(PRUNE, model, sgd(model), total_steps=4) as again:  # the model is free
        steps(again, model, 4)
    assert again.session.receipt()["unreached"] == {}
    assert (model[0].weight == 0).sum() > 100


def test_a_resumed_block_equals_the_whole():
    def run(model, optimizer, count, **more):
        recipe = {**PRUNE, "average": {"kind": "ema"}}
        with training(recipe, model, optimizer, total_steps=4, **more) as loop:
            if "resumed" in more:
                optimizer.load_state_dict(saved[2])
            steps(loop, model, count)
            return copy.deepcopy([model.state_dict(), loop.session.state_dict(), optimizer.state_dict()])

    whole = net()
    run(whole, sgd(whole), 4)
    stopped = net()
    saved = run(stopped, sgd(stopped), 2)
    again = net()
    again.load_state_dict(saved[0])
    run(again, sgd(again), 2, resumed=saved[1])
    assert difference(dict(whole.state_dict()), dict(again.state_dict())) is None


def test_an_optimizer_that_is_not_torchs_is_refused_by_its_class():
    class Own:
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

    model = net()
    with (
        pytest.raises(TrainingError, match=r"optimizer must be a torch\.optim\.Optimizer, .*got .*Own"),
        training(PRUNE, model, Own(model.parameters()), total_steps=4),
    ):
        pass
    session = Session(PRUNE)
    session.attach(model)
    with pytest.raises(TrainingError, match=r"got .*Own"):
        session.begin([Own(model.parameters())], total_steps=4)
    session.detach()
    assert list(model.state_dict()) == list(net().state_dict())


def test_an_optimizer_of_another_model_or_with_state_is_refused():
    model = net()
    with (
        pytest.raises(TrainingError, match="holds no parameters of the Sequential"),
        training(PRUNE, model, sgd(net()), total_steps=4),
    ):
        pass
    optimizer = sgd(model)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    with (
        pytest.raises(TrainingError, match="has stepped already, but techniques add or replace"),
        training({"low_rank": {"rank": 2, "min_size": 0}}, model, optimizer, total_steps=4),
    ):
        pass
    assert list(model.state_dict()) == list(net().state_dict())
    half = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(CompatibilityError), training({"soup": {"kind": "uniform"}}, model, half, total_steps=1):
        pass


@pytest.mark.parametrize(("recipe", "refused"), [
    ({"qat": {"scheme": "int8"}, "average": {"kind": "ema"}}, "qat: needs training batches after average"),
    ({"qat": {"scheme": "int8_dynamic"}, "average": {"kind": "ema"}}, None),
    ({"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5}}, None),
])  # fmt: skip
def test_what_needs_batches_at_the_end_is_refused_at_the_start_without(recipe, refused):
    model = net()
    optimizer = sgd(model)

    class Calibrating(Services):
        def calibrate(self, num_batches):
            for _ in range(num_batches):
                model(torch.ones(2, 16))

    def train(services):
        with training(recipe, model, optimizer, total_steps=2, services=services) as loop:
            steps(loop, model, 2)

    with pytest.raises(CompatibilityError, match=refused) if refused else contextlib.nullcontext():
        train(Services())
    train(Calibrating())


class Keras:
    """Stands for an optimizer of another library."""

    def __init__(self, variables):
        self.variables = list(variables)

    def apply(self, gradients):
        raise AssertionError


class Wrapping:
    def __init__(self, parameters):
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(("wrong", "says"), [
    (Keras, r"must be a torch.optim.Optimizer, .* got .*Keras; use an optimizer"),
    (Wrapping, r"got .*Wrapping; pass the SGD inside it"),
    (list, r"got builtins.list"),
    (lambda parameters: None, r"got builtins.NoneType"),
])  # fmt: skip
def test_an_optimizer_of_another_library_is_refused_before_anything_is_changed(wrong, says):
    model = net()
    layers = list(model)
    with (
        pytest.raises(TrainingError, match=says),
        training(ADDING, model, wrong(model.parameters()), total_steps=4),
    ):
        pass
    assert [*model] == layers
    session = Session(PRUNE)
    session.attach(model)
    with pytest.raises(TrainingError, match=says):
        session.begin([wrong(model.parameters())], total_steps=4)
    with pytest.raises(TrainingError, match="optimizers must be a list"):
        session.begin(Keras([]), total_steps=4)
    session.detach()


@pytest.mark.parametrize("recipe", [
    {"low_rank": {"rank": 2, "force": True, "min_size": 1}}, {"qat": {"scheme": "int8", "range": "lsq", "begin": 0}},
])  # fmt: skip
def test_what_muon_does_not_take_joins_another_optimizer_or_is_refused(recipe):
    def muon_and_adam():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 4))
        sides = ([one for one in model.parameters() if (one.ndim == 2) is matrix] for matrix in (True, False))
        return model, torch.optim.Muon(next(sides)), torch.optim.AdamW(next(sides))

    model, muon, _ = muon_and_adam()
    if "low_rank" in recipe:  # the convolution is in no optimizer, so it counts as frozen
        with training(recipe, model, muon, total_steps=2) as loop:
            assert type(model[0]) is nn.Conv2d
            assert "no optimizer holds the parameters of 0" in loop.session.notes[0]
    else:
        with (
            pytest.raises(TrainingError, match=r"adds 2\..* Muon takes only matrices"),
            training(recipe, model, muon, total_steps=2),
        ):
            pass
        assert [type(layer) for layer in model] == [nn.Conv2d, nn.Flatten, nn.Linear, nn.Linear]
        assert [len(group) for group in held(muon)] == [2]

    model, *optimizers = muon_and_adam()
    session = Session(recipe)
    attach_with(session, model, optimizers)
    session.begin(optimizers, total_steps=2)
    trained = [value for value in model.parameters() if value.requires_grad]
    assert {*map(id, trained)} == {id(one) for optimizer in optimizers for group in held(optimizer) for one in group}
    assert all(one.ndim == 2 for group in held(optimizers[0]) for one in group)
    before = [value.detach().clone() for value in trained]
    session.loss(model(torch.randn(2, 4, 4, 4)).square().mean()).backward()
    session.before_step()
    for optimizer in optimizers:
        optimizer.step()
    session.after_step()
    assert not any(
        torch.equal(value, old) for value, old in zip(trained, before, strict=True) if value.grad is not None
    )
    session.detach()


def test_an_optimizer_that_steps_inside_backward_cannot_take_what_is_added_after_it():
    model = net()
    inner = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    for parameter in inner:
        parameter.register_post_accumulate_grad_hook(lambda one: inner[one].step())
    with (
        pytest.raises(TrainingError, match="SGD steps inside backward"),
        training(
            {"lora": {"rank": 2, "base": "none", "include": ["0"]}},
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            total_steps=2,
        ) as loop,
    ):
        steps(loop, model, 2)


def test_data_parallel_is_refused_and_ddp_where_its_parameters_change(tmp_path):
    model = nn.DataParallel(net())
    with (
        pytest.raises(CompatibilityError, match=r"prune cannot be combined with torch\.nn\.DataParallel"),
        training(PRUNE, model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=2),
    ):
        pass
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        for recipe in ({"lora": {"rank": 2, "base": "none"}}, ADDING):
            with pytest.raises(CompatibilityError, match=r"attach to model\.module first, then wrap it"):
                Session(recipe).attach(model)
        assert [type(layer) for layer in model.module] == [nn.Linear, nn.ReLU, nn.Linear]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with training(PRUNE, model, optimizer, total_steps=2) as loop:
            steps(loop, model, 2)
        weights = [model.module[index].weight for index in (0, 2)]
        assert sum(int((weight == 0).sum()) for weight in weights) == sum(weight.numel() for weight in weights) // 2
    finally:
        dist.destroy_process_group()
