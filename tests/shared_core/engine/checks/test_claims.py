"""What a receipt says of final weights is found again in them, and one weight that differs is found too."""

from contextlib import nullcontext

import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn

from efftrain import training
from shared_core.engine.checks.claims import Grid, Where
from shared_core.errors import ReceiptError


def trained(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 4))
    session, optimizer = begun_session(recipe, model, 4)
    for _ in range(4):
        plain_step(session, optimizer, model(torch.randn(8, 96)).square().mean())
    session.finish()
    return session, model


SCHEMES = ("int8", "int8_weight", "int4_weight", "W4A8", "fp8", "mxfp4", "MXFP8", "ternary", "binary")
RECIPES = {
    "prune": {"prune": {"sparsity": 0.6, "schedule": "one_shot", "begin": 1}},
    "neuron": {"prune": {"sparsity": 0.5, "granularity": "neuron", "schedule": "one_shot", "begin": 1}},
    "cluster": {"cluster": {"bits": 3, "begin": 2, "min_size": 64}},
    "low_rank": {"low_rank": {"rank": 4, "force": True, "merge": True}},
    "average": {"average": {"kind": "ema", "decay": 0.5}},
    "average of pruned": {
        "average": {"kind": "ema", "decay": 0.5},
        "prune": {"sparsity": 0.6, "schedule": "one_shot", "begin": 1},
    },
    "low_rank averaged": {"average": {"kind": "swa"}, "low_rank": {"rank": 4, "force": True, "merge": True}},
    "lsq": {"qat": {"scheme": "int8", "range": "lsq", "begin": 1}},
    **{scheme: {"qat": {"scheme": scheme, "begin": 1}} for scheme in SCHEMES},
    "fp8_tensor": {"qat": {"weights": "fp8_tensor", "begin": 1}},
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_weight_that_moved_is_found(recipe):
    session, model = trained(recipe)
    session.files.verify(None, "the model")
    session.files.verify(dict(model.state_dict()), "a file")
    with torch.no_grad():
        model[0].weight += 1e-3 * torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    for weights in (None, dict(model.state_dict())):
        with pytest.raises(ReceiptError, match=r"^run/model: .*0.weight.* Swa, Ema may have changed"):
            session.files.verify(weights, "run/model", ["Swa", "Ema", "Swa"])
    assert any("differ from this receipt" in note for note in session.receipt()["notes"])


def test_a_dead_weight_that_the_receipt_counts_as_live_is_found():
    session, model = trained(RECIPES["prune"])
    with torch.no_grad():
        model[0].weight.view(-1)[model[0].weight.view(-1).nonzero()[0]] = 0
    with pytest.raises(ReceiptError, match="weights are 0, the receipt says"):
        session.files.verify(None, "the model")
    session.files.verify(None, "a checkpoint of that step", where=Where.TRAINED)  # of which no figure was told


def test_not_a_number_is_not_what_was_said():
    for name in ("prune", "cluster", "int8", "low_rank", "average"):
        session, model = trained(RECIPES[name])
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
        with pytest.raises(ReceiptError):
            session.files.verify(None, name)


def test_a_tensor_that_is_gone_is_told_of_the_model_alone():
    session, model = trained(RECIPES["prune"])
    weights = dict(model.state_dict())
    del weights["0.weight"]
    session.files.verify(weights, "a file that leaves some out")
    model[0] = nn.Identity()
    with pytest.raises(ReceiptError, match=r"prune: 0.weight is missing"):
        session.files.verify(None, "the model")


def in_a_loop(**modules):
    torch.manual_seed(0)
    model = nn.ModuleDict(modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with training({"prune": {"sparsity": 0.5, "end": 1, "min_size": 1}}, model, optimizer, total_steps=2) as loop:
        for _ in range(2):
            with loop.forward():
                loss = sum(module(torch.randn(4, 8)).square().mean() for module in modules.values())
            loop.backward(loss)
            loop.step()
            loop.zero_grad()
    return loop.session, model


def told(session):
    return [note for note in session.receipt()["notes"] if "not checked" in note]


def test_a_file_of_a_part_is_counted_under_the_names_of_the_model():
    session, model = in_a_loop(body=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), head=nn.Linear(8, 2))
    for wrong in (False, True):
        body = {name: value + 1e-3 * wrong for name, value in model["body"].state_dict().items()}
        # of the part alone, through a wrapper, and beside names of the model and of something else
        files = body, {f"_orig_mod.{name}": value for name, value in body.items()}
        for file in (*files, {**body, "head.weight": model["head"].weight, "metric.total": torch.ones(())}):
            found = pytest.raises(ReceiptError, match=r"prune: body\.0\.weight") if wrong else nullcontext()
            with found:
                session.files.verify(file, "part.pt")
    assert not told(session)
    file = {**model["body"].state_dict(), "head.weight": model["head"].weight + 1e-3}
    with pytest.raises(ReceiptError, match=r"prune: head\.weight"):
        session.files.verify(file, "part.pt")


def test_a_part_with_two_names_is_counted_and_one_that_may_be_either_of_two_is_told():
    shared = nn.Linear(8, 8)
    session, model = in_a_loop(first=shared, second=nn.Sequential(nn.Linear(8, 8, bias=False), shared))
    with pytest.raises(ReceiptError, match=r"first\.weight"):
        session.files.verify({"weight": shared.weight + 1e-3, "bias": shared.bias}, "own.pt")
    session, model = in_a_loop(first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    session.files.verify(model["first"].state_dict(), "twin.pt")
    session.files.verify({"other": torch.ones(3)}, "strange.pt")
    twin, strange = told(session)
    assert "twin.pt" in twin
    assert "fit first and second of the model" in twin
    assert "strange.pt" in strange
    assert "other" in strange


def test_the_step_of_a_learned_scale_may_be_any_but_must_be_one():
    steps, codes = (
        torch.tensor([[0.1], [0.7]]),
        torch.randint(-90, 91, (2, 40), generator=torch.Generator().manual_seed(0)),
    )
    claim = Grid(lambda weight: weight, levels=256, largest=127, any_step=True)
    assert claim.wrong(steps * codes, Where.END) is None
    assert "away from the nearest code" in Grid(claim.rows, 256, largest=127).wrong(steps * codes, Where.END)
    assert "away from the nearest code" in claim.wrong(steps * codes + torch.eye(2, 40) * 0.03, Where.END)


def test_products_of_codes_and_a_zero_point_are_rounded_by_their_own_size():
    codes, zeros = torch.arange(-8, 8.0).repeat(40, 1), torch.arange(40.0) % 16 - 8
    scale = torch.linspace(0.011, 0.37, 40).bfloat16().float()
    claim = Grid(lambda weight: weight, levels=16, largest=7, scale=scale, zeros=zeros)
    weight = (codes - zeros[:, None]) * scale[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        assert claim.wrong(weight.to(dtype), Where.END) is None
    assert claim.wrong((weight + 0.3 * scale[:, None]).bfloat16(), Where.END) is not None
