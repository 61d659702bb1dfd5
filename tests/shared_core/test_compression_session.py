"""Weight sharing in a session: centroids trained as the paper says, members equal to the bit, exact resume."""

import copy

import pytest
import torch
from torch import nn

from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.pruning import ShareConfig, compress, decompress
from shared_core.recipe import Recipe
from shared_core.session import Session

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def make_net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20), nn.Tanh(),
                         nn.Linear(20, 4)).to(dtype)  # fmt: skip


def make_session(model, optimizer="adamw", total_steps=40, state=None, prune=None, clips=False, **options):
    recipe = {"share": {"bits": 3, "begin": 10, "min_size": 100, **options}}
    session = Session(Recipe.from_dict(recipe | ({"prune": prune} if prune else {})))
    session.attach(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=total_steps, clips_gradients=clips)
    return session, optimizer


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 12, generator=generator).to(dtype), torch.randn(16, 4, generator=generator).to(dtype)


def train(session, optimizer, model, steps, check=None, clip=None, parts=1):
    for step in steps:
        x, y = batch(step, next(model.parameters()).dtype)
        for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (session.loss((model(inputs) - labels).square().mean()) / parts).backward()
        session.before_optimizer_step()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        session.after_optimizer_step()
        optimizer.zero_grad()
        if check is not None:
            check(step + 1)


def values_of(weight):
    weight = weight.detach()
    return weight[weight != 0].unique()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_members_of_a_cluster_stay_equal_to_the_bit(optimizer):
    model = make_net()
    session, opt = make_session(model, optimizer)
    clusters, seen = {}, []

    def check(step):
        for i in (0, 3):
            weight = model[i].weight.detach()
            if step < 10:
                assert len(values_of(weight)) > 100
                continue
            values, codes = weight.unique(return_inverse=True)
            assert len(values) == 8
            first = clusters.setdefault(i, codes)
            for cluster in range(8):
                # who belongs together never changes, though two centroids may pass each other
                assert len(weight[first == cluster].unique()) == 1
            seen.append(values)

    train(session, opt, model, range(40), check)
    session.finish()
    assert len(values_of(model[5].weight)) > 8  # 80 weights, fewer than min_size
    assert not torch.equal(seen[0], seen[-2])


class Codebook(nn.Module):
    """What training of centroids means: the values are the parameters, the weight is looked up."""

    def __init__(self, linear):
        super().__init__()
        values, self.codes = linear.weight.detach().unique(return_inverse=True)
        self.values, self.bias = nn.Parameter(values.clone()), nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, self.values[self.codes], self.bias)


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw", "amsgrad"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_training_is_that_of_a_codebook(optimizer, clip):
    model = make_net(dtype=torch.float64)
    session, opt = make_session(model, optimizer, begin=0)
    reference = copy.deepcopy(model)
    reference[0], reference[3] = Codebook(model[0]), Codebook(model[3])
    theirs = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(30):
        train(session, opt, model, [step], clip=clip)
        x, y = batch(step, torch.float64)
        (reference(x) - y).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        theirs.step()
        theirs.zero_grad()
        for i in (0, 3):
            expected = reference[i].values[reference[i].codes]
            assert torch.allclose(model[i].weight, expected, rtol=1e-9, atol=1e-11), step
        assert torch.allclose(model[5].weight, reference[5].weight, rtol=1e-9, atol=1e-11)


def test_the_optimizer_starts_anew_for_centroids():
    model = make_net(dtype=torch.float64)
    session, opt = make_session(model, "adamw", begin=7)
    train(session, opt, model, range(7))
    state = opt.state[model[0].weight]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert state["step"] == 0
    assert opt.state[model[5].weight]["step"] == 7
    before = model[0].weight.detach().clone()
    train(session, opt, model, [7])
    # Adam's first step moves every centroid by the learning rate, after the decay
    moved = (model[0].weight.detach() - before * (1 - 0.01 * 0.1)).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.01), rtol=1e-4)


def test_the_norm_of_gradients_is_that_of_the_centroids():
    model = make_net(dtype=torch.float64)
    session, _ = make_session(model, begin=0)
    x, y = batch(0, torch.float64)
    (model(x) - y).square().mean().backward()
    weight = model[0].weight
    values, codes = weight.detach().unique(return_inverse=True)
    sums = torch.stack([weight.grad[codes == i].sum() for i in range(len(values))])
    session.before_optimizer_step()
    assert weight.grad.norm() == pytest.approx(sums.norm().item(), rel=1e-12)
    assert int(weight.grad.count_nonzero()) == len(values)


def test_micro_batches_are_one_batch():
    models = []
    for parts in (1, 4):
        model = make_net(dtype=torch.float64)
        model[1] = nn.Identity()  # statistics of a batch are not those of its parts
        session, opt = make_session(model)
        train(session, opt, model, range(30), parts=parts)
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused"])
def test_zeros_stay_positive_zeros_beside_pruning(optimizer):
    model = make_net()
    prune = {"sparsity": 0.8, "begin": 2, "end": 10, "every": 2, "include": ["0", "3"]}
    session, opt = make_session(model, optimizer, prune=prune, clips=True)
    zeros = {}

    def check(step):
        if step < 10:
            return
        for i in (0, 3):
            weight = model[i].weight.detach()
            dead = zeros.setdefault(i, weight == 0)
            assert not weight[dead].any()
            assert not weight[dead].signbit().any()
            assert len(values_of(weight)) <= 8

    train(session, opt, model, range(40), check, clip=0.5)
    session.finish()
    assert sum(int(dead.sum()) for dead in zeros.values()) == round(0.8 * (360 + 600))


def test_zeros_that_pruning_left_behind_earlier_stay_zeros():
    model = make_net()
    with torch.no_grad():
        model[0].weight.mul_(model[0].weight.abs() > 0.15)
    dead = model[0].weight.detach() == 0
    session, opt = make_session(model, begin=0)
    train(session, opt, model, range(15))
    assert torch.equal(model[0].weight.detach() == 0, dead)


@pytest.mark.parametrize("stop", [0, 5, 9, 10, 11, 25, 39])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_is_the_same_to_the_bit(stop, optimizer):
    prune = {"sparsity": 0.5, "begin": 2, "end": 8, "every": 2}
    whole = make_net()
    session, opt = make_session(whole, optimizer, prune=prune)
    train(session, opt, whole, range(40))
    session.finish()

    first = make_net()
    session, opt = make_session(first, optimizer, prune=prune)
    train(session, opt, first, range(stop))
    state = copy.deepcopy({"session": session.state_dict(), "optimizer": opt.state_dict(), "model": first.state_dict()})
    second = make_net(seed=1)
    second.load_state_dict(state["model"])
    session, opt = make_session(second, optimizer, state=state, prune=prune)
    train(session, opt, second, range(stop, 40))
    session.finish()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
    assert session.receipt().values["techniques"]["share"]["clustered_at_step"] == 10


def test_the_state_fits_a_state_file(tmp_path):
    from shared_core.state_file import load_state, save_state

    model = make_net()
    session, opt = make_session(model, bits=8, bits_of=["0=2"])
    train(session, opt, model, range(12))
    save_state(tmp_path, session.state_dict())
    back = load_state(tmp_path)["techniques"]["share"]
    for name, codes in session.state_dict()["techniques"]["share"]["codes"].items():
        assert torch.equal(back["codes"][name], codes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda codes: {"other.weight": codes["0.weight"]},
        lambda codes: {**codes, "0.weight": codes["0.weight"].t()},
        lambda codes: {**codes, "0.weight": codes["0.weight"].float()},
        lambda codes: {**codes, "0.weight": codes["0.weight"].to(torch.int16) * 100},
        lambda codes: {**codes, "0.weight": -codes["0.weight"].to(torch.int16)},
    ],
)
def test_clusters_of_another_model_are_refused(spoil):
    model = make_net()
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    state = copy.deepcopy(session.state_dict())
    state["techniques"]["share"]["codes"] = spoil(state["techniques"]["share"]["codes"])
    other = Session(session.recipe)
    other.attach(make_net())
    with pytest.raises(CheckpointError, match="share: saved clusters must be those of this model's weights"):
        other.load_state_dict(state)


def test_a_cluster_without_members_is_refused():
    model = make_net()
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    state = copy.deepcopy(session.state_dict())
    codes = state["techniques"]["share"]["codes"]["0.weight"]
    codes[codes == 3] = 4
    with pytest.raises(CheckpointError, match=r"clusters of 0\.weight must have members"):
        make_session(make_net(), state={"session": state, "optimizer": opt.state_dict()})


def test_a_run_that_stops_early_is_clustered_when_it_finishes():
    model = make_net()
    session, opt = make_session(model, begin=30)
    train(session, opt, model, range(5))
    assert len(values_of(model[0].weight)) > 8
    session.finish()
    assert len(values_of(model[0].weight)) == 8
    assert session.receipt().values["techniques"]["share"]["clustered_at_step"] == 5


def test_skipped_steps_do_not_count():
    model = make_net()
    session, opt = make_session(model, begin=3)
    train(session, opt, model, range(2))
    before = copy.deepcopy(model.state_dict())
    for _ in range(5):
        session.before_optimizer_step()
        session.skipped_optimizer_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    train(session, opt, model, range(2, 3))
    assert len(values_of(model[0].weight)) == 8


def test_what_is_written_is_what_was_trained(tmp_path):
    model = make_net()
    session, opt = make_session(model, bits=4, bits_of=["3=2"], prune={"sparsity": 0.6, "begin": 0, "end": 5})
    train(session, opt, model, range(40))
    session.finish()
    done = compress(model.state_dict(), tmp_path / "m.eff", bits=4, min_size=100)
    assert all(line.rms_error == 0 for line in done.tensors)
    assert {line.name: line.clusters for line in done.tensors if line.clusters} == {"0.weight": 16, "3.weight": 4}
    back = decompress(tmp_path / "m.eff")
    plain = make_net(seed=3)
    plain.load_state_dict(back)
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_the_receipt_counts_in_the_weights():
    model = make_net()
    session, opt = make_session(model, skip=["last"], bits_of=["first=2"])
    train(session, opt, model, range(15))
    assert session.metrics()["share/values"] == 4 + 8
    session.finish()
    report = session.receipt().values["techniques"]["share"]
    rows = {row["name"]: row for row in report["tensors"]}
    assert set(rows) == {"0.weight", "3.weight"}
    assert (rows["0.weight"]["bits"], rows["0.weight"]["values"]) == (2, 4)
    assert (rows["3.weight"]["bits"], rows["3.weight"]["values"]) == (3, 8)
    assert rows["0.weight"]["bytes"] == 4 * 360
    assert rows["0.weight"]["code_bytes"] == 360 * 2 // 8 + 4 * 4
    assert 0 < rows["0.weight"]["rms_error"] < 0.3
    assert report["bytes"] == 4 * (360 + 600)
    model[0].weight.data.fill_(2.0)  # recounted, not remembered
    assert session.techniques["share"].report()["tensors"][0]["values"] == 1


def test_weights_from_elsewhere_are_tied_again():
    model = make_net()
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    with torch.no_grad():
        model[0].weight.add_(1e-3 * torch.randn_like(model[0].weight))
    session.context.weights_replaced()
    assert len(values_of(model[0].weight)) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    model = make_net(dtype=torch.float32)
    model[1] = nn.Identity()
    model.to(dtype)
    session, opt = make_session(model, "sgd")
    train(session, opt, model, range(20))
    assert len(values_of(model[0].weight)) <= 8


def test_weights_that_are_not_laid_out_in_order():
    models = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 20, 2), nn.Flatten(), nn.Linear(20, 4)).double()
        model[1].weight.data = model[1].weight.data.to(memory_format=memory_format)
        session, opt = make_session(model)
        train(session, opt, model, range(25))
        models.append(model)
    assert models[1][1].weight.is_contiguous(memory_format=torch.channels_last)
    assert len(values_of(models[1][1].weight)) == 8
    assert torch.allclose(models[0][1].weight, models[1][1].weight, rtol=0, atol=1e-12)


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
    session = Session(Recipe.from_dict({"share": {"bits": 3, "begin": 0, "min_size": 100, **options}}))
    session.attach(model)
    return session.techniques["share"]._targets


def test_which_weights_are_shared():
    found = targets(Tied())
    assert list(found.modules) == ["embed.weight", "hidden.weight", "conv.weight"]
    assert found.left_out == {"normed.weight": "computed, by weight norm or another parametrisation"}
    for odd in (nn.Embedding(40, 16, sparse=True), nn.Embedding(40, 16, max_norm=1.0)):
        model = nn.Sequential(odd, nn.Linear(16, 16))
        assert targets(model).left_out == {
            "0.weight": "an embedding with sparse gradients, or one that is normalised in forward"
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"include": ["nothing"]}, MatchError, "share: include pattern 'nothing' matches no module"),
        ({"bits_of": ["nothing=4"]}, MatchError, "share: bits_of: include pattern 'nothing' matches no module"),
        ({"min_size": 10_000}, MatchError, "share: must match at least one module"),
        ({"bits_of": ["0=9"]}, ConfigError, r"bits_of must be PATTERN=BITS with bits in \[2, 8\]"),
        ({"bits_of": ["0"]}, ConfigError, "bits_of must be PATTERN=BITS"),
        ({"bits": 1}, ConfigError, r"share.bits: bits must be in \[2, 8\], got 1"),
        ({"bits": float("nan")}, ConfigError, "share.bits"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_training(options, error, message):
    with pytest.raises(error, match=message):
        make_session(make_net(), **options)


def test_sharing_must_wait_for_pruning_to_end():
    with pytest.raises(ConfigError, match="share: begin must not lie before step 20, when weights are pruned"):
        make_session(make_net(), prune={"sparsity": 0.5, "begin": 0, "end": 20})
    make_session(make_net(), prune={"sparsity": 0.5, "begin": 0, "end": 10})


def test_lbfgs_is_refused():
    model = make_net()
    session = Session(Recipe.from_dict({"share": {"bits": 3, "begin": 0, "min_size": 100}}))
    session.attach(model)
    with pytest.raises(CompatibilityError, match="share: optimizer must not be LBFGS"):
        session.begin([torch.optim.LBFGS(model.parameters())], total_steps=5)


def test_weights_that_diverged_are_named():
    model = make_net()
    session, opt = make_session(model, begin=30)
    train(session, opt, model, range(2))
    model[3].weight.data[2, 3] = torch.nan
    with pytest.raises(TrainingError, match=r"share: 3\.weight: weights must be finite"):
        session.finish()


def test_detach_leaves_the_plain_model():
    model = make_net()
    keys = list(model.state_dict())
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    session.detach()
    assert list(model.state_dict()) == keys
    assert {type(module) for module in model} == {nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Tanh}
    opt.step()


def test_options_from_text():
    config = ShareConfig.from_dict({"bits": "5", "bits_of": "conv*=8, last=6", "begin": "0.9"})
    assert (config.bits, config.widths()) == (5, {"conv*": 8, "last": 6})
