"""Experts that no token reached in a run are told, and a resumed run knows those that were reached before."""

import pytest
import torch
from mixtures import KINDS, mixture, rows
from plain_loop import plain_step

from shared_core import Session
from shared_core.errors import CheckpointError

EXPERTS = "model.layers.0.mlp.experts"
RECIPES = ({"prune": {"sparsity": 0.5}}, {"qat": {"scheme": "int8_weight"}})


def run(net, recipe, chosen, state=None, compiled=False):
    """Train a step a choice, in which all tokens go to two experts; return the session and its state in the end."""
    session = Session(recipe)
    session.attach(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if state is not None:
        session.load_state_dict(state)
    session.begin([optimizer], total_steps=4)
    forward = torch.compile(net, backend="eager") if compiled else net

    pair = torch.zeros(2, dtype=torch.int64)

    def route(module, args):
        return args[0], pair.expand_as(args[1]), args[2]

    hook = net.get_submodule(EXPERTS).register_forward_pre_hook(route, prepend=True)
    ids = torch.stack([row["input_ids"] for row in rows(2)])
    for experts in chosen:
        pair.copy_(torch.tensor(experts))
        plain_step(session, optimizer, forward(ids, labels=ids).loss)
    with session.swapped("evaluate"), torch.no_grad():
        pair.fill_(3)
        net.eval()(ids)
    net.train()
    saved = session.state_dict()
    hook.remove()
    return session, saved


@pytest.mark.parametrize("recipe", RECIPES, ids=["prune", "qat"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_tokens_are_told_at_the_end(kind, recipe):
    net = mixture(kind)
    session, _ = run(net, recipe, [(0, 1)] * 4)
    session.finish()
    receipt = session.receipt()
    assert receipt["experts_without_tokens"] == {EXPERTS: [2, 3]}
    assert any(f"learned nothing: {EXPERTS} 2, 3" in note for note in receipt["notes"])
    assert not net.get_submodule(EXPERTS)._forward_pre_hooks


def test_a_resumed_run_knows_those_that_were_reached_before():
    net = mixture("mixtral")
    _, state = run(net, RECIPES[0], [(0, 1)] * 2)
    again = mixture("mixtral")
    session, _ = run(again, RECIPES[0], [(2, 2)] * 2, state)
    session.finish()
    assert session.receipt()["experts_without_tokens"] == {EXPERTS: [3]}
    state["experts"][EXPERTS] = state["experts"][EXPERTS][1:]
    with pytest.raises(CheckpointError, match=r"has 4 experts, but 3 in the checkpoint"):
        run(mixture("mixtral"), RECIPES[0], [], state)


@pytest.mark.slow
def test_a_compiled_model_is_watched_too():
    session, _ = run(mixture("mixtral"), RECIPES[0], [(0, 3)] * 4, compiled=True)
    session.finish()
    assert session.receipt()["experts_without_tokens"] == {EXPERTS: [1, 2]}
