"""`prune` on trained models: the technique's own masks, references in float64, and nothing but zeros left behind."""

import copy
import json

import pytest
import torch
from plain_loop import plain_step
from torch import nn
from torch.func import functional_call, grad
from transformers import BertConfig, BertForSequenceClassification

from shared_core import Session
from shared_core.engine.recipe import Recipe
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.pruning import PruneConfig, prune_mask
from shared_core.pruning.post_training import DURING_TRAINING, as_config, prune

OPTIONS = {
    "global": {},
    "local": {"scope": "local"},
    "erdos_renyi": {"scope": "erdos_renyi_kernel"},
    "threshold": {"criterion": "threshold", "threshold": 0.05},
    "random": {"criterion": "random"},
    "bytes": {"cost": "bytes"},
    "flops": {"cost": "flops"},
    "taylor": {"criterion": "taylor"},
    "fisher": {"criterion": "fisher"},
    "fisher_energy": {"criterion": "fisher", "cost": "energy"},
    "wanda": {"criterion": "wanda"},
    "n_m": {"sparsity": 0.5, "granularity": "n_m"},
    "n_m_wanda": {"sparsity": 0.5, "granularity": "n_m", "criterion": "wanda"},
    "block": {"granularity": "block", "block": "2x3"},
    "filter": {"granularity": "filter", "criterion": "l2_norm", "scope": "local"},
    "layer": {"sparsity": 0.3, "granularity": "layer", "criterion": "l1_norm"},
    "geometric": {"granularity": "channel", "criterion": "geometric_median"},
    "bn_scale": {"granularity": "channel", "criterion": "bn_scale"},
    "neuron": {"granularity": "neuron", "criterion": "taylor"},
    "neuron_flops": {"granularity": "neuron", "cost": "flops"},
    "neuron_taylor": {"granularity": "neuron", "criterion": "neuron_taylor"},
    "filter_taylor": {"granularity": "filter", "criterion": "taylor"},
    "unit_fisher": {"granularity": "channel", "criterion": "fisher"},
    "shapley": {"granularity": "channel", "criterion": "shapley", "permutations": 3},
}


class Net(nn.Module):
    """A convolution, a norm that never looks at the batch, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, track_running_stats=True, momentum=0.0)
        self.fc = nn.Linear(8 * 4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.out(torch.relu(self.fc(x.mean(-1).flatten(1))))


class Dropping(nn.Module):
    """Batch norm and dropout, in modes that a user has mixed."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 3)
        self.train()
        self.norm.eval()

    def forward(self, x):
        return self.out(self.drop(self.norm(self.fc(x)).relu()))


def trained(kind=Net, seed=0):
    torch.manual_seed(seed)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean)
    return model


def pairs(count=3, size=6, shape=(4, 4, 4), dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, *shape, generator=generator).to(dtype), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def pruned_by_technique(options, batch):
    """Return a model that the technique has pruned in one step of learning rate 0, on norms in evaluation mode."""
    model = trained()
    session = Session(Recipe.from_dict({"prune": {"schedule": "one_shot", "begin": 0, **options}}), seed=7)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session.begin([optimizer], total_steps=4)
    model.norm.eval()
    plain_step(session, optimizer, cross_entropy(model, batch))
    session.finish()
    return model


@pytest.mark.parametrize("name", OPTIONS)
def test_masks_are_those_of_the_technique_on_the_same_batch(name):
    options = {"sparsity": 0.6, **OPTIONS[name]}
    (batch,) = pairs(1)
    expected = pruned_by_technique(options, batch).state_dict()
    model = trained()
    report = prune(model, options, [batch], loss=cross_entropy, seed=7)
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert 0 < report.pruned < report.numel
    parameters = dict(model.named_parameters())
    assert report.pruned == sum(int((parameters[entry["name"]] == 0).sum()) for entry in report.tensors)
    for key, mask in report.masks.items():
        assert mask.dtype == torch.bool
        assert torch.equal(parameters[key] != 0, mask & (trained().get_parameter(key) != 0))


def test_wanda_is_the_norm_of_inputs_over_all_batches_within_rows():
    model, batches = trained(Dropping), [x for x, _ in pairs(4, shape=(6,))]
    reference = copy.deepcopy(model).eval().double()
    seen = {"fc": [], "out": []}
    for name, found in seen.items():
        getattr(reference, name).register_forward_pre_hook(lambda _, args, found=found: found.append(args[0]))
    for batch in batches:
        reference(batch.double())
    report = prune(model, {"sparsity": 0.5, "criterion": "wanda"}, batches)
    for name, found in seen.items():
        weight = getattr(reference, name).weight.detach()
        scores = weight.abs() * torch.cat(found).square().sum(0).sqrt()
        order = scores.argsort(1)
        expected = torch.ones_like(scores, dtype=torch.bool).scatter_(1, order[:, : weight.shape[1] // 2], False)
        assert torch.equal(report.masks[f"{name}.weight"], expected)
    assert (report.batches, report.examples) == (4, 24)


@pytest.mark.parametrize("criterion", ["taylor", "fisher"])
def test_gradients_are_a_mean_over_batches_and_examples(criterion):
    model, batches = trained(Dropping).double(), pairs(3, size=5, shape=(6,), dtype=torch.float64)
    reference = copy.deepcopy(model).eval()
    parameters = {name: value.detach() for name, value in reference.named_parameters()}
    total = dict.fromkeys(("fc.weight", "out.weight"), 0.0)

    def gradient(x, y):
        loss = lambda p: nn.functional.cross_entropy(functional_call(reference, p, (x,)), y)  # noqa: E731
        return grad(loss)(parameters)

    for x, y in batches:
        for piece in [slice(None)] if criterion == "taylor" else [slice(i, i + 1) for i in range(5)]:
            found = gradient(x[piece], y[piece])
            for name in total:
                total[name] += (found[name] * parameters[name]).abs() if criterion == "taylor" else found[name] ** 2
    if criterion == "fisher":
        total = {name: value * parameters[name] ** 2 / 2 for name, value in total.items()}
    flat = torch.cat([value.reshape(-1) for value in total.values()])
    report = prune(model, {"sparsity": 0.7, "criterion": criterion}, batches, loss=cross_entropy)
    found = torch.cat([report.masks[name].reshape(-1) for name in total])
    assert torch.equal(found, prune_mask(flat, 0.7))
    assert report.examples == 15


def test_neuron_taylor_is_the_mean_of_activation_times_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    batches = pairs(2, shape=(6,), dtype=torch.float64)
    scores = torch.zeros(10, dtype=torch.float64)
    for x, y in batches:
        for i in range(len(x)):
            hidden = model[0](x[i : i + 1]).detach().requires_grad_(True)
            loss = nn.functional.cross_entropy(model[2](hidden.relu()), y[i : i + 1])
            scores += (hidden * torch.autograd.grad(loss, hidden)[0]).abs()[0]
    options = {"sparsity": 0.4, "criterion": "neuron_taylor", "granularity": "neuron"}
    report = prune(model, options, batches, loss=cross_entropy)
    keep = prune_mask(scores, 0.4)
    assert torch.equal(model[0].weight.any(1), keep)
    assert torch.equal(model[0].bias != 0, keep)
    assert [entry["pruned"] for entry in report.units] == [4]
    assert "2" in report.groups_left_out


def state_of(model):
    hooks = sum(
        len(getattr(module, kind))
        for module in model.modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )
    modes = [module.training for module in model.modules()]
    gradients = [(id(p), p.requires_grad, p.grad) for p in model.parameters()]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return hooks, modes, [(i, r) for i, r, _ in gradients], [g for *_, g in gradients], buffers


def assert_same_state(before, after):
    assert before[:3] == after[:3]
    assert all(old is new for old, new in zip(before[3], after[3], strict=True))
    assert all(torch.equal(before[4][name], after[4][name]) for name in before[4])


STATEFUL = [
    {"criterion": "wanda"},
    {"criterion": "fisher"},
    {"criterion": "taylor", "granularity": "neuron", "cost": "flops"},
    {"criterion": "shapley", "granularity": "neuron"},
]


@pytest.mark.parametrize("options", STATEFUL, ids=lambda options: options["criterion"])
def test_nothing_but_weights_changes(options):
    model = trained(Dropping)
    batches = pairs(3, shape=(6,))
    cross_entropy(model, batches[0]).backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    model.out.bias.requires_grad_(False)
    before, random = state_of(model), torch.get_rng_state()
    prune(model, {"sparsity": 0.5, **options}, batches, loss=cross_entropy)
    assert_same_state(before, state_of(model))
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("options", STATEFUL[:3], ids=lambda options: options["criterion"])
@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_error_leaves_the_model_as_it_was(options, fails_at):
    model, calls = trained(Dropping), []

    def loss(model, batch):
        calls.append(batch)
        found = cross_entropy(model, batch)
        if len(calls) == fails_at:
            raise RuntimeError("no more")
        return found

    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="no more"):
        prune(model, {"sparsity": 0.5, **options}, pairs(3, shape=(6,)), loss=loss)
    assert_same_state(before, state_of(model))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_model_of_transformers_brings_its_loss():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    other = copy.deepcopy(model)
    batches = [{"input_ids": torch.randint(20, (4, 6)), "labels": torch.tensor([0, 1, 2, 0])} for _ in range(2)]
    first = prune(model, {"sparsity": 0.5, "criterion": "fisher"}, batches)
    second = prune(other, {"sparsity": 0.5, "criterion": "fisher"}, batches, loss=lambda m, b: m(**b)["loss"])
    assert all(torch.equal(mask, second.masks[name]) for name, mask in first.masks.items())
    assert first.examples == 8
    unlabeled = [{"input_ids": batch["input_ids"]} for batch in batches]
    with pytest.raises(ConfigError, match=r"loss must be a scalar .* for criterion taylor, got NoneType"):
        prune(model, {"sparsity": 0.5, "criterion": "taylor"}, unlabeled)
    heads = prune(model, {"sparsity": 0.5, "granularity": "head"}, unlabeled)
    assert ([entry["pruned"] for entry in heads.units], heads.examples) == ([1], 0)


@pytest.mark.parametrize("options", [{"criterion": "fisher"}, {"granularity": "neuron", "criterion": "taylor"}])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_pruned_like_itself(options, in_place):
    model, plain, batches = trained(Dropping), trained(Dropping), pairs(2, shape=(6,))
    compiled = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    cross_entropy(compiled.eval(), batches[0])
    report = prune(compiled, {"sparsity": 0.5, **options}, batches, loss=cross_entropy)
    expected = prune(plain, {"sparsity": 0.5, **options}, batches, loss=cross_entropy)
    assert set(report.masks) == set(expected.masks)
    assert all(torch.equal(mask, report.masks[name]) for name, mask in expected.masks.items())


def test_training_on_keeps_the_zeros():
    model = trained(Dropping)
    report = prune(model, {"sparsity": 0.5, "criterion": "wanda"}, [x for x, _ in pairs(2, shape=(6,))])
    options = {"sparsity": report.sparsity, "schedule": "one_shot", "begin": 0}
    session = Session(Recipe.from_dict({"prune": options}))
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    session.begin([optimizer], total_steps=3)
    for batch in pairs(3, shape=(6,)):
        plain_step(session, optimizer, cross_entropy(model, batch))
    for name, mask in report.masks.items():
        assert torch.equal(dict(model.named_parameters())[name] != 0, mask)


@pytest.mark.parametrize("criterion", ["taylor", "fisher"])
def test_batches_without_finite_gradients_are_left_out(criterion):
    good, bad = pairs(2, shape=(6,)), pairs(1, shape=(6,))
    bad[0][0][0] = torch.nan
    options = {"sparsity": 0.5, "criterion": criterion}
    model, clean = trained(Dropping), trained(Dropping)
    report = prune(model, options, [*bad, *good], loss=cross_entropy)
    expected = prune(clean, options, good, loss=cross_entropy)
    assert (report.batches, report.batches_left_out, report.examples) == (2, 1, 12)
    assert all(torch.equal(mask, report.masks[name]) for name, mask in expected.masks.items())
    with pytest.raises(TrainingError, match="NaN or infinity in all 1 batches"):
        prune(trained(Dropping), options, bad, loss=cross_entropy)


def test_frozen_weights_that_include_names_are_scored_and_stay_frozen():
    model, free = trained(Dropping).requires_grad_(False), trained(Dropping)
    batches = pairs(2, shape=(6,))
    options = {"sparsity": 0.5, "criterion": "taylor"}
    with pytest.raises(MatchError, match="frozen; name its module in include"):
        prune(model, options, batches, loss=cross_entropy)
    report = prune(model, {**options, "include": ("*",)}, batches, loss=cross_entropy)
    expected = prune(free, options, batches, loss=cross_entropy)
    assert all(torch.equal(mask, report.masks[name]) for name, mask in expected.masks.items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_random_is_of_its_seed_and_progress_and_num_batches_count():
    options = {"sparsity": 0.5, "criterion": "random"}
    first, second, other = (prune(trained(), options, seed=seed).masks["fc.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    seen = []
    report = prune(
        trained(), {"sparsity": 0.5, "criterion": "wanda"}, (x for x, _ in pairs(9)), num_batches=3,
        progress=lambda *at: seen.append(at),
    )  # fmt: skip
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert report.batches == 3


def test_the_report_is_plain_and_counts():
    model = trained()
    model.out.requires_grad_(False)
    report = prune(model, PruneConfig(sparsity=0.5))
    values = json.loads(json.dumps(report.to_dict()))  # so without masks
    assert values["pruned"] == round(0.5 * (8 * 4 * 9 + 16 * 32)) == sum(entry["pruned"] for entry in values["tensors"])
    assert values["left_out"] == {"out.weight": "frozen; name its module in include to prune it"}
    assert (values["criterion"], values["granularity"], values["examples"]) == ("magnitude", "unstructured", 0)
    assert values["seconds"] > 0
    assert "not get faster" in values["note"]
    assert "`eff shrink` keeps them" in prune(trained(), {"sparsity": 0.5, "granularity": "layer"}).note


@pytest.mark.parametrize("value", [*DURING_TRAINING])
def test_options_of_training_are_refused_by_name(value):
    given = {
        "schedule": "cubic", "initial_sparsity": 0.1, "begin": 0.2, "end": 0.9, "every": 5, "dynamic": "recompute",
        "drop_share": 0.4, "sr_ste": 1e-3, "regularizer": "l1", "regularizer_strength": 1.0,
    }[value]  # fmt: skip
    with pytest.raises(ConfigError, match=f"prune: {value} must be left out after training, got {given!r}"):
        prune(trained(), {"sparsity": 0.5, value: given})
    if value not in ("schedule", "drop_share", "sr_ste", "regularizer_strength"):  # the default, or they need others
        with pytest.raises(ConfigError, match=f"{value} must be left out"):
            prune(trained(), PruneConfig(sparsity=0.5, **{value: given}))


def test_wrong_input_is_refused_before_any_work():
    model, batches = trained(Dropping), [x for x, _ in pairs(2, shape=(6,))]
    weights = copy.deepcopy(model.state_dict())
    cases = [
        ({"criterion": "movement"}, {}, "criterion must.*movement.*after training"),
        ({"criterion": "wanda"}, {}, "calibration must be given with criterion wanda"),
        ({"granularity": "neuron"}, {}, "calibration must be given with granularity neuron"),
        ({"cost": "flops"}, {}, "calibration must be given with cost flops"),
        ({"criterion": "wanda"}, {"calibration": []}, "calibration must be given with criterion wanda, got no batches"),
        ({"criterion": "wanda"}, {"calibration": batches, "num_batches": 0}, r"num_batches must be in \[1, inf\)"),
        ({"criterion": "wanda"}, {"calibration": [{"y": 1}]}, "calibration must hold what the model takes"),
        ({"criterion": "taylor"}, {"calibration": batches}, "loss must be a scalar"),
        ({"criterion": "taylor"}, {"calibration": batches, "loss": lambda m, b: m(b)}, r"of shape \(6, 3\)"),
        ({"criterion": "fisher"}, {"calibration": batches, "loss": lambda m, b: m(b).sum().detach()}, "depends on"),
        ({"granularity": "neuron"}, {"calibration": batches, "loss": lambda m, b: m.fc(b)}, "must call the model"),
        ({"sparsity": 1.0}, {}, "sparsity must be in"),
        ({"criterio": "wanda"}, {}, "did you mean 'criterion'"),
    ]
    for options, arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            prune(model, {"sparsity": 0.5, **options}, **arguments)
    with pytest.raises(ConfigError, match="prune must be a mapping of its options"):
        prune(model, 0.5)
    with pytest.raises(ConfigError, match=r"criterion must.*after training"):
        as_config(PruneConfig(sparsity=0.5, criterion="movement"))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.fc.weight[0, 0] = torch.inf
    with pytest.raises(CompatibilityError, match="must be finite"):
        prune(model, {"sparsity": 0.5})
