"""A model copied or pickled in training, as users do for averages and backups, takes nothing of the run along."""

import copy
import gc
import io
import itertools

import pytest
import torch
from promise_drivers import difference, prepared_loop
from promise_table import BATCH, make_net, recipe_of, train_examples
from torch.utils.data import DataLoader

from shared_core import Session


def sessions():
    gc.collect()
    return sum(isinstance(one, Session) for one in gc.get_objects())


def pickled(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def run(kind, key, folder, *, copies):
    net = make_net(recipe=(key.partition("-")[0],))
    parts = net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(train_examples(), batch_size=BATCH)
    library, model, optimizer, loader = prepared_loop(kind, recipe_of(key), folder, parts)
    for step, inputs in enumerate(itertools.chain(loader, loader)):
        model.train()
        library.backward(model(**inputs)["loss"])
        before = sessions()
        for made in (copy.deepcopy(net), copy.deepcopy(model), pickled(net)) if copies and step == 2 else ():
            assert sessions() == before
            made(**inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "accelerate":
        library.end_training()
    return net.state_dict()


@pytest.mark.parametrize(
    ("kind", "key"),
    [("fabric", "prune"), *(("accelerate", key) for key in ("prune-neuron", "prune-units", "prune-wanda", "dp"))],
)
def test_a_copy_made_in_training_is_apart_from_the_run(kind, key, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = run(kind, key, tmp_path / "plain", copies=False)
        torch.manual_seed(0)
        found = run(kind, key, tmp_path / "copied", copies=True)
    assert difference(expected, found) is None
