"""Low rank: the optimum in closed form, exactness at full rank, ranks, what is left alone, saving, refusals."""

import copy
import itertools

import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn
from torch.nn.utils import parametrizations

from shared_core import Session
from shared_core.engine.services import Services
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, EffError, MatchError, TrainingError
from shared_core.low_rank import LowRankConfig, LowRankLayer, factorize, load, merge
from shared_core.low_rank.config import parse_rank
from shared_core.low_rank.layers import decompose
from shared_core.low_rank.rank_selection import share_out

ALL = {"min_size": 0, "skip": ()}


def correlated(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator).double() / torch.arange(1, size + 1)
    return torch.randn(count, size, generator=generator).double() @ mix


def conv_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(8, 16, (3, 5), padding=(2, 1), stride=(1, 2), dilation=(2, 1), padding_mode="circular"), nn.ReLU(),
        nn.Conv2d(16, 6, 3, padding="same", padding_mode="reflect"), nn.Flatten(), nn.Linear(6 * 6 * 3, 20),
    ).double()  # fmt: skip


IMAGES = torch.randn(6, 3, 12, 16, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_whitening_is_the_closed_form_optimum_of_the_output(rank):
    inputs, weight = correlated(200, 8), torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).double()
    rank = min(rank, 5)
    a, b = decompose(weight, inputs.T @ inputs).factors(rank)
    found = ((weight - b @ a) @ inputs.T).norm()
    # reduced-rank regression: project the outputs on their own leading directions, an independent derivation
    outputs = inputs @ weight.T
    directions = torch.linalg.eigh(outputs.T @ outputs).eigenvectors[:, -rank:]
    torch.testing.assert_close(b @ a, directions @ directions.T @ weight, atol=1e-8, rtol=0)
    torch.testing.assert_close(found, torch.linalg.svdvals(outputs)[rank:].norm(), atol=1e-9, rtol=0)
    errors = []
    for moment in (None, (inputs.T @ inputs).diagonal()):
        a, b = decompose(weight, moment).factors(rank)
        errors.append(((weight - b @ a) @ inputs.T).norm())
    assert found < 0.99 * min(errors)


def test_a_diagonal_moment_is_the_optimum_for_uncorrelated_inputs():
    weight, sizes = torch.randn(5, 7).double(), torch.rand(7).double() + 0.1
    (a, b), (c, d) = (decompose(weight, moment).factors(2) for moment in (sizes, sizes.diag()))
    torch.testing.assert_close(b @ a, d @ c)


def test_fewer_inputs_than_dimensions_are_no_obstacle():
    inputs, weight = correlated(3, 8), torch.randn(6, 8).double()
    a, b = decompose(weight, inputs.T @ inputs).factors(3)
    assert ((weight - b @ a) @ inputs.T).norm() < 1e-6 * (weight @ inputs.T).norm()
    assert a.isfinite().all()
    zero, _ = decompose(weight, torch.zeros(8, 8)).factors(2)
    assert zero.isfinite().all()


@pytest.mark.parametrize("conv", ["channel", "spatial"])
@pytest.mark.parametrize("decomposition", ["svd", "scaled", "whitened"])
def test_full_rank_is_exact_and_so_is_the_product(decomposition, conv):
    net = conv_net()
    expected, names = net(IMAGES), list(net.state_dict())
    options = {"rank": 1.0, "force": True, "conv": conv, "decomposition": decomposition, **ALL}
    report = factorize(net, options, [IMAGES] if decomposition != "svd" else None)
    assert [layer["scheme"] for layer in report.layers] == [conv] * 3 + ["linear"]
    torch.testing.assert_close(net(IMAGES), expected, atol=1e-5, rtol=0)
    factorized = net(IMAGES)
    assert merge(net) == ["0", "2", "4", "6"]
    assert list(net.state_dict()) == names
    assert type(net[0]) is nn.Conv2d
    torch.testing.assert_close(net(IMAGES), factorized, atol=1e-6, rtol=0)


@pytest.mark.parametrize("scheme", ["channel", "spatial"])
def test_the_inputs_of_a_convolution_are_what_its_matrix_multiplies(scheme):
    conv = conv_net()[2]
    inputs = torch.randn(4, 8, 6, 8).double()
    net = nn.Sequential(copy.deepcopy(conv))
    report = factorize(net, {"rank": 2, "conv": scheme, "decomposition": "whitened", **ALL}, [inputs])
    error = float((net(inputs) - conv(inputs)).norm() / (conv(inputs) - conv.bias[:, None, None]).norm())
    if scheme == "channel":  # exactly; of spatial the error is that of the columns one by one
        assert abs(error - report.layers[0]["output_error"]) < 1e-9
    other = nn.Sequential(copy.deepcopy(conv))
    factorize(other, {"rank": 2, "conv": scheme, **ALL})
    assert error < float((other(inputs) - conv(inputs)).norm() / (conv(inputs) - conv.bias[:, None, None]).norm())


def test_transformers_conv1d():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    net = nn.Sequential(Conv1D(12, 20), nn.Linear(12, 2))
    x, kept = torch.randn(3, 20), net[0].weight.detach().clone()
    full = copy.deepcopy(net)
    factorize(full, {"rank": 12, "force": True, "min_size": 0})
    torch.testing.assert_close(full(x), net(x), atol=1e-5, rtol=0)
    merge(full)
    assert isinstance(full[0], Conv1D)
    torch.testing.assert_close(full[0].weight, nn.Parameter(kept), atol=1e-5, rtol=0)


def test_a_budget_is_the_brute_force_optimum_where_it_is_spent():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gains = {name: torch.rand(4, generator=generator).sort(descending=True).values.cumsum(0) for name in "abc"}
        choices = {name: [(i + 1, float(gain)) for i, gain in enumerate(each)] for name, each in gains.items()}
        for budget in range(3, 13):
            found = share_out(choices, budget)
            best = max(
                sum(choices[name][i][1] for name, i in zip(choices, picks, strict=True))
                for picks in itertools.product(range(4), repeat=3)
                if sum(i + 1 for i in picks) <= budget
            )
            assert sum(choices[name][i][1] for name, i in found.items()) == pytest.approx(best)


def test_steps_that_pay_late_are_taken_whole():
    # the second point alone is worth nothing, the third much: the hull steps over the second
    assert share_out({"a": [(1, 0.0), (2, 0.0), (3, 9.0)], "b": [(1, 0.0), (2, 1.0)]}, 4) == {"a": 2, "b": 0}


def low_rank_net(ranks=(2, 20), size=40):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(size, size) for _ in ranks), nn.Linear(size, 3))
    for layer, rank in zip(net, ranks, strict=False):
        layer.weight.data = torch.randn(size, rank) @ torch.randn(rank, size)
    return net


def test_ranks_by_energy_share_number_and_multiple():
    for rank, expected in (("energy:1.0", [2]), (0.25, [10, 10]), ("3", [3, 3])):
        report = factorize(low_rank_net(), {"rank": rank, "min_size": 0})
        assert [layer["rank"] for layer in report.layers] == expected
    report = factorize(low_rank_net(), {"rank": 5, "min_size": 0, "multiple_of": 8})
    assert [layer["rank"] for layer in report.layers] == [8, 8]
    assert report.layers[0]["weight_error"] < 1e-5 < report.layers[1]["weight_error"]
    assert sum(p.numel() for p in low_rank_net().parameters()) == report.parameters[0]


def test_a_layer_that_would_not_shrink_is_left_alone_and_named():
    report = factorize(low_rank_net(), {"rank": "energy:1.0", "min_size": 0})
    assert report.left_out == {"1": "rank 20 saves nothing: 1600 parameters instead of 1600"}
    with pytest.raises(MatchError, match=r"no layer .* rank 30"):
        factorize(low_rank_net(), {"rank": 30, "min_size": 0})


def test_a_budget_is_kept_and_goes_to_the_layer_that_needs_it():
    report = factorize(low_rank_net((2, 15)), {"rank": "budget:0.45", "min_size": 0})
    ranks = {layer["name"]: layer["rank"] for layer in report.layers}
    assert ranks["0"] in (2, 3)  # a third direction is rounding alone, and which rounding decides where a rest goes
    assert ranks["1"] > 10
    assert sum(layer["parameters_after"] for layer in report.layers) <= 0.45 * 2 * 1600
    with pytest.raises(ConfigError, match="rank 1 in every layer"):
        factorize(low_rank_net(), {"rank": "budget:0.01", "min_size": 0})


def test_a_small_budget_keeps_the_most_of_what_passes_all_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(120, 90), nn.Linear(90, 16)).double()
    kept, sides = [], (210, 106)
    for layer in net:
        squares = torch.linalg.svdvals(layer.weight.detach()).square()
        kept.append(squares.cumsum(0) / squares.sum())
    budget = int(0.1 * (120 * 90 + 90 * 16))
    report = factorize(net, {"rank": "budget:0.1", "min_size": 0, "skip": []})
    chosen = [layer["rank"] for layer in report.layers]
    products = {
        (first, second): float(kept[0][first - 1] * kept[1][second - 1])
        for first in range(1, 51)
        for second in range(1, 14)
        if first * sides[0] + second * sides[1] <= budget
    }
    assert products[tuple(chosen)] > 0.9 * max(products.values())  # one step of a layer may not fit
    sums = {(first, second): float(kept[0][first - 1] + kept[1][second - 1]) for first, second in products}
    assert chosen[0] > 1 == max(sums, key=sums.get)[0]  # by sums the large layer would keep a single direction


def test_sensitivity_measures_which_layer_the_loss_needs():
    torch.manual_seed(0)
    net = nn.ModuleDict({"used": nn.Linear(30, 30), "idle": nn.Linear(30, 30), "head": nn.Linear(30, 2)})
    x, y = torch.randn(64, 30), torch.randn(64, 30)
    target = net["used"](x).detach() + 0.01 * y
    before = copy.deepcopy(net.state_dict())

    def loss(model, batch):
        return (model["used"](batch) + 0.0 * model["idle"](batch) - target).square().mean()

    report = factorize(net, {"rank": "sensitivity:0.6", "min_size": 0}, [x], loss=loss)
    assert [layer["name"] for layer in report.layers] == ["idle"]
    assert report.left_out.keys() == {"used"}
    assert torch.equal(net["used"].weight, before["used.weight"])  # put back after it was tried
    with pytest.raises(ConfigError, match="loss must be a number"):
        factorize(low_rank_net(), {"rank": "sensitivity:0.5", "min_size": 0}, [torch.ones(1, 40)])


class Awkward(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(32, 32)
        self.again = self.plain
        self.normed = parametrizations.weight_norm(nn.Linear(32, 32))
        self.tied, self.embed = nn.Linear(32, 50, bias=False), nn.Embedding(50, 32)
        self.tied.weight = self.embed.weight
        self.grouped = nn.Conv2d(32, 32, 3, groups=2)
        self.attention = nn.MultiheadAttention(32, 2)
        self.hooked = nn.Linear(32, 32)
        self.hooked.register_forward_hook(lambda *args: None)
        self.adapted = nn.Module()
        self.adapted.base_layer, self.adapted.lora_A = nn.Linear(32, 32), nn.ModuleDict()


def test_what_cannot_be_factorized_is_named_and_a_shared_module_stays_one():
    net = Awkward()
    report = factorize(net, {"rank": 4, **ALL}, allow_partial=True)
    assert [layer["name"] for layer in report.layers] == ["plain", "attention.out_proj"]
    assert isinstance(net.plain, LowRankLayer)
    assert net.again is net.plain
    assert {name: reason.split(",")[0] for name, reason in report.left_out.items()} == {
        "normed": "its weight is computed by a parametrization",
        "tied": "its weight is tied to another layer's",
        "grouped": "it has 2 groups",
        "attention": "torch reads query",
        "hooked": "it has its own hooks",
        "adapted.base_layer": "it is part of a layer with adapters",
    }


def test_frozen_16_bit_layers_stay_frozen_and_16_bit():
    net = nn.Sequential(nn.Linear(64, 64).bfloat16().requires_grad_(False), nn.Linear(64, 2).bfloat16())
    factorize(net, {"rank": 4, "min_size": 0})
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in net[0].parameters())
    merge(net)
    assert net[0].weight.dtype is torch.bfloat16
    assert not net[0].weight.requires_grad


def test_the_fused_path_of_torchs_encoder_sees_the_factors():
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0), 1).eval()
    x = torch.randn(2, 5, 32)
    factorize(net, {"rank": 3, **ALL})
    with torch.no_grad():
        fused = net(x)
    torch.testing.assert_close(fused, net.train()(x), atol=1e-6, rtol=0)
    attention, seen = net.layers[0].self_attn, []
    attention.out_proj.second.register_forward_hook(lambda *_: seen.append(1))
    net(x)
    assert seen == [1]
    merge(net)
    assert type(attention) is nn.MultiheadAttention


def test_saved_weights_load_in_a_fresh_model(tmp_path):
    net = conv_net()
    factorize(net, {"rank": "budget:0.4", "decomposition": "whitened", **ALL}, [IMAGES])
    fresh = load(conv_net(seed=5), net.state_dict())
    assert torch.equal(fresh(IMAGES), net(IMAGES))
    assert list(fresh.state_dict()) == list(net.state_dict())
    merge(fresh)
    torch.testing.assert_close(fresh(IMAGES), net(IMAGES))
    with pytest.raises(CheckpointError, match="got none"):
        load(conv_net(), conv_net().state_dict())
    broken = {name: value for name, value in net.state_dict().items() if name != "0.bias"}
    with pytest.raises(CheckpointError, match=r"missing \['0.bias'\]"):
        load(conv_net(), broken)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="must hold safetensors"):
        load(conv_net(), tmp_path)


@pytest.mark.parametrize(
    "rank", [0, -1, 1.5, True, "energy:0", "energy:nan", "budget:2", "rank:3", "energy", "", None, "1e400"]
)
def test_ranks_that_mean_nothing_are_refused(rank):
    with pytest.raises(ConfigError, match="rank must be"):
        LowRankConfig(rank=rank)


LITTLE = {"rank": 2, "min_size": 0}


@pytest.mark.parametrize(
    ("change", "options", "error", "match"),
    [
        (lambda net: net[0].weight.data.fill_(float("nan")), {}, TrainingError, "must be finite"),
        (lambda net: net.to("meta"), {}, CompatibilityError, "without values"),
        (lambda net: factorize(net, LITTLE), {}, CompatibilityError, "already factorized"),
        (lambda net: None, {"rank": "budget:0.5", "force": True}, ConfigError, "force "),
        (lambda net: None, {"decomposition": "whitened"}, ConfigError, "batches must be given with whitened"),
        (lambda net: None, {"merge": True}, ConfigError, "merge must be left out"),
        (lambda net: None, {"rank": "/nowhere/none.json"}, ConfigError, "report of eff low-rank"),
    ],
)
def test_what_cannot_be_factorized_is_refused_untouched(change, options, error, match):
    net = low_rank_net()
    change(net)
    kept = list(net.state_dict())
    with pytest.raises(error, match=match):
        factorize(net, {**LITTLE, **options})
    assert list(net.state_dict()) == kept


def test_a_layer_that_saw_no_input_is_refused():
    with pytest.raises(TrainingError, match="must get finite inputs"):
        factorize(low_rank_net(), {**LITTLE, "decomposition": "scaled"}, [1], loss=lambda m, b: 0.0)
    assert parse_rank(1).kind == "number"
    assert parse_rank("1.0").kind == "share"


class LoopServices(Services):
    def __init__(self, model, data):
        self.model, self.data, self.calls = model, data, 0

    def calibrate(self, num_batches):
        self.calls += 1
        for batch in self.data[:num_batches]:
            self.model.train()(batch)


def session_of(net, services=None, **options):
    session = Session({"low_rank": {"min_size": 0, **options}}, services=services)
    session.attach(net)
    return session


def test_a_session_calibrates_before_the_first_step_like_factorize():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Linear(24, 2)).double()
    alone, x = copy.deepcopy(net), correlated(50, 20)
    services = LoopServices(net, [x])
    session = session_of(net, services, rank=4, decomposition="whitened", calibration_batches=1)
    session.begin([], total_steps=2)
    factorize(alone, {"rank": 4, "decomposition": "whitened", "min_size": 0}, [x])
    torch.testing.assert_close(net[0].weight, alone[0].weight)
    assert torch.equal(net[1].running_mean, torch.zeros(24).double())
    told = session.receipt().values["techniques"]["low_rank"]
    assert told["per_layer"][0]["output_error"] < told["per_layer"][0]["weight_error"]
    saved = session.state_dict()
    fresh = nn.Sequential(nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Linear(24, 2))
    again = session_of(fresh, LoopServices(fresh, []), rank=4, decomposition="whitened")
    again.load_state_dict(saved)
    again.begin([], total_steps=2)  # resumed: nothing is looked at


def test_a_session_gives_the_layers_back_or_keeps_the_factors_or_their_product():
    before = low_rank_net()
    net = copy.deepcopy(before)
    layer = net[0]
    session_of(net, rank=2).detach()
    assert net[0] is layer
    assert torch.equal(net[0].weight, before[0].weight)
    for is_merged in (False, True):
        net = copy.deepcopy(before)
        session = session_of(net, rank=2, merge=is_merged)
        session.begin([torch.optim.SGD(net.parameters(), 0.1)], total_steps=1)
        assert session.files.bake(net.state_dict()).keys() == (before if is_merged else net).state_dict().keys()
        net(torch.ones(1, 40)).sum().backward()
        trained = net(torch.ones(1, 40))
        session.finish()
        assert isinstance(net[0], nn.Linear if is_merged else LowRankLayer)
        torch.testing.assert_close(net(torch.ones(1, 40)), trained, atol=1e-4, rtol=1e-5)
        assert bool(session.files.deployment()) is not is_merged
    again = session_of(load(copy.deepcopy(before), _factors(before)), rank=9, merge=True)  # trained as it is
    assert again.receipt().values["techniques"]["low_rank"]["structure"]["0"]["rank"] == 2


def _factors(net):
    net = copy.deepcopy(net)
    factorize(net, {"rank": 2, "min_size": 0})
    return net.state_dict()


def test_an_optimizer_from_before_is_refused_and_so_are_measured_ranks():
    net = low_rank_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(CompatibilityError, match="created before"):
        session_of(net, rank=2).begin([optimizer], total_steps=1)
    with pytest.raises(EffError, match="eff low-rank"):
        session_of(low_rank_net(), rank="sensitivity:0.5")


@pytest.mark.parametrize("beside", ["prune", "qat"])
def test_factors_can_be_pruned_and_quantized(beside):
    net = low_rank_net()
    more = {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}, "qat": {"scheme": "int8", "begin": 1}}
    recipe = {"low_rank": {"rank": 4, "min_size": 0}, beside: more[beside]}
    session, optimizer = begun_session(recipe, net, 2, lr=1e-3, services=LoopServices(net, [torch.randn(4, 40)]))
    for _ in range(2):
        plain_step(session, optimizer, net(torch.randn(4, 40)).square().mean())
    session.finish()
    values = net[0].first.weight.detach()
    assert isinstance(net[0], LowRankLayer)
    if beside == "prune":
        assert (values == 0).float().mean() > 0.2
    else:
        codes = values / values.abs().amax(1, keepdim=True) * 127
        torch.testing.assert_close(codes, codes.round(), atol=1e-3, rtol=0)
    with pytest.raises(CompatibilityError, match="low_rank_merge false"):
        Session(recipe | {"low_rank": {"rank": 4, "merge": True}}).attach(low_rank_net())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.again(torch.relu(self.first(x)))))


def started_twice(recipe, state=None):
    torch.manual_seed(0)
    model = Twice()
    session = Session(recipe)
    session.attach(model, resumed=state["session"]["techniques"] if state else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if state:
        model.load_state_dict(state["model"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=4)
    return model, session, optimizer


def train(model, session, optimizer, to):
    while session.step < to:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(session.step))
        plain_step(session, optimizer, model(x).square().mean())


def test_a_module_at_two_places_is_baked_under_both_names():
    model, session, optimizer = started_twice({"low_rank": {"rank": 2, "merge": True, "min_size": 0}})
    train(model, session, optimizer, 2)
    baked = session.files.bake(model.state_dict())
    session.finish()
    assert baked.keys() == Twice().state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, baked[name]) for name, value in model.state_dict().items())


def test_scales_are_learned_of_factors_that_a_resume_has_yet_to_load(monkeypatch):
    # NaN in what was never written: torch.empty alone gives whatever lay there
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        recipe = {"low_rank": {"rank": 2, "min_size": 0}, "qat": {"scheme": "int8", "range": "lsq"}}
        whole = started_twice(recipe)
        train(*whole, 2)
        parts = {"model": whole[0], "session": whole[1]}
        again = started_twice(recipe, copy.deepcopy({name: part.state_dict() for name, part in parts.items()}))
        for run in (whole, again):
            train(*run, 4)
            run[1].finish()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(value, again[0].state_dict()[name]) for name, value in whole[0].state_dict().items())
