import functools
import json
import random

import numpy as np
import pytest
import torch

from shared_core.engine.saving.own_generators import OwnGenerators
from shared_core.engine.saving.state_file import load_state, save_state


class Holder:
    def __init__(self, **parts):
        vars(self).update(parts)


def draw(one):
    return float(torch.rand((), generator=one)) if isinstance(one, torch.Generator) else float(one.random())


KINDS = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    "legacy": lambda seed: np.random.RandomState(seed),
    **{
        name: functools.partial(lambda kind, seed: np.random.Generator(kind(seed)), getattr(np.random, name))
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_made", [True, False], ids=["there", "made at the first draw"])
def test_every_kind_goes_on_where_it_was(kind, is_made, tmp_path):
    one = KINDS[kind](5)
    draw(one)
    save_state(tmp_path, {"own": OwnGenerators(Holder(generator=one)).states()})
    following = [draw(one) for _ in range(700)]
    other = Holder(generator=KINDS[kind](6) if is_made else None)
    OwnGenerators(other).restore(load_state(tmp_path)["own"])
    assert [draw(other.generator) for _ in range(700)] == following


def test_where_they_are_looked_for():
    generator = {name: random.Random(index) for index, name in enumerate("abcdef")}

    def closure(x):
        return generator["c"].random() + x

    holder = Holder(
        wrapped=Holder(generator=generator["a"]),
        partial=functools.partial(Holder, generator["b"]),
        closure=closure,
        method=Holder(generator=generator["d"]).__init__,
        listed=[Holder(inner={"key": generator["e"]})],
        data=[generator["f"]] * 100,
    )
    holder.itself = holder
    found = [state["state"] for state in OwnGenerators(holder).states()]
    assert len(found) == 6  # f is reached through the closure's dict alone
    json.dumps(found)


def test_one_that_two_share_is_found_once_and_what_has_changed_is_left():
    one = random.Random(1)
    own = OwnGenerators(Holder(a=one, b=one))
    states = own.states()
    assert len(states) == 1
    other = Holder(a="text", b="text")
    OwnGenerators(other).restore(states)
    assert vars(other) == {"a": "text", "b": "text"}
