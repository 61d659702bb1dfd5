"""Which weights a session shares, and what it refuses before training."""

import pytest
import torch
from mixtures import mixture, stacks
from share_runs import make_net, make_session
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.weight_clustering import ClusterConfig


class Tied(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv1d(8, 8, 3)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.embed.weight.requires_grad_(not frozen)


def targets(model, **options):
    session = Session({"cluster": {"bits": 3, "begin": 0, "min_size": 100, **options}})
    session.attach(model)
    return session.techniques["cluster"]._targets


def test_which_weights_are_shared():
    found = targets(Tied())
    assert list(found.modules) == ["embed.weight", "hidden.weight", "conv.weight"]
    assert found.left_out == {"normed.weight": "computed, by weight norm or another parametrization"}
    for odd in (nn.Embedding(40, 16, sparse=True), nn.Embedding(40, 16, max_norm=1.0)):
        model = nn.Sequential(odd, nn.Linear(16, 16))
        assert targets(model).left_out == {
            "0.weight": "an embedding with sparse gradients, or one that is normalized in forward"
        }
    found = targets(Tied(), skip=["head"])
    assert found.left_out["embed.weight"] == "shared with head.weight, which is not chosen"
    assert "frozen" in targets(Tied(frozen=True)).left_out["embed.weight"]
    assert "embed.weight" in targets(Tied(frozen=True), include=["embed", "head", "hidden"]).modules
    assert targets(Tied(), bits_of=["Conv1d=8", "h*=2"]).bits == {
        "embed.weight": 3,
        "hidden.weight": 2,
        "conv.weight": 8,
    }


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"include": ["nothing"]}, MatchError, "cluster: include pattern 'nothing' matches no module"),
    ({"bits_of": ["nothing=4"]}, MatchError, "cluster: bits_of: include pattern 'nothing' matches no module"),
    ({"min_size": 10_000}, MatchError, "cluster: must match at least one module"),
    ({"bits_of": ["0=9"]}, ConfigError, r"bits_of must be PATTERN=BITS with bits in \[2, 8\]"),
    ({"bits_of": ["0"]}, ConfigError, "bits_of must be PATTERN=BITS"),
    ({"bits": 1}, ConfigError, r"cluster.bits: bits must be in \[2, 8\], got 1"),
    ({"bits": float("nan")}, ConfigError, "cluster.bits"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused_before_training(options, error, message):
    with pytest.raises(error, match=message):
        make_session(make_net(), **options)


def test_sharing_must_wait_for_pruning_to_end():
    with pytest.raises(ConfigError, match="cluster: begin must not lie before step 20, when weights are pruned"):
        make_session(make_net(), prune={"sparsity": 0.5, "begin": 0, "end": 20})
    make_session(make_net(), prune={"sparsity": 0.5, "begin": 0, "end": 10})


def test_lbfgs_is_refused():
    model = make_net()
    session = Session({"cluster": {"bits": 3, "begin": 0, "min_size": 100}})
    session.attach(model)
    with pytest.raises(CompatibilityError, match="cluster cannot be combined with an LBFGS"):
        session.begin([torch.optim.LBFGS(model.parameters())], total_steps=5)


def test_options_from_text():
    config = ClusterConfig.from_dict({"bits": "5", "bits_of": "conv*=8, last=6", "begin": "0.9"})
    assert (config.bits, config.widths()) == (5, {"conv*": 8, "last": 6})


def test_min_size_chooses_weights_of_a_packed_layer():
    found = targets(nn.ModuleDict({"gru": nn.GRU(4, 8), "rest": nn.Linear(16, 16)}))
    assert list(found.modules) == ["gru.weight_hh_l0", "rest.weight"]
    assert found.left_out == {"gru.weight_ih_l0": "left out by min_size"}


def test_stacked_experts_share_the_values_of_a_stack():
    net = mixture("mixtral")
    session = Session({"cluster": {"bits": 3, "begin": 0, "min_size": 1, "include": ["*.experts"]}})
    session.attach(net)
    session.begin([torch.optim.SGD(net.parameters(), lr=0.1)], total_steps=2)
    stacked = stacks(net)
    assert list(session.techniques["cluster"]._targets.modules) == [*stacked]
    assert {len(weight.unique()) for weight in stacked.values()} == {8}
