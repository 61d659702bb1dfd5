"""Weight sharing in a session: centroids trained as the paper says, members equal to the bit."""

import copy

import pytest
import torch
from share_runs import OPTIMIZERS, batch, make_net, make_session, train, values_of
from torch import nn

from shared_core.errors import TrainingError
from shared_core.tools.compression import compress, decompress


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
    session.before_step()
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


def test_a_run_that_stops_early_keeps_its_weights_and_says_so():
    model = make_net()
    session, opt = make_session(model, begin=30)
    train(session, opt, model, range(5))
    before = model[0].weight.detach().clone()
    session.finish()
    assert torch.equal(model[0].weight, before)
    assert "step 30" in session.receipt()["unreached"]["cluster"]


def test_skipped_steps_do_not_count():
    model = make_net()
    session, opt = make_session(model, begin=3)
    train(session, opt, model, range(2))
    before = copy.deepcopy(model.state_dict())
    for _ in range(5):
        session.before_step()
        session.after_step(applied=False)
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
    assert session.figures()["cluster/values"] == 4 + 8
    session.finish()
    report = session.receipt().values["techniques"]["cluster"]
    rows = {row["name"]: row for row in report["tensors"]}
    assert set(rows) == {"0.weight", "3.weight"}
    assert (rows["0.weight"]["bits"], rows["0.weight"]["values"]) == (2, 4)
    assert (rows["3.weight"]["bits"], rows["3.weight"]["values"]) == (3, 8)
    assert rows["0.weight"]["bytes"] == 4 * 360
    assert rows["0.weight"]["code_bytes"] == 360 * 2 // 8 + 4 * 4
    assert 0 < rows["0.weight"]["rms_error"] < 0.3
    assert report["bytes"] == 4 * (360 + 600)
    model[0].weight.data.fill_(2.0)  # recounted, not remembered
    assert session.techniques["cluster"].report()["tensors"][0]["values"] == 1


def test_weights_from_elsewhere_are_tied_again():
    model = make_net()
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    with torch.no_grad():
        model[0].weight.add_(1e-3 * torch.randn_like(model[0].weight))
    session.context.report_weights_replaced()
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


def test_weights_that_diverged_are_named():
    model = make_net()
    model[3].weight.data[2, 3] = torch.nan
    with pytest.raises(TrainingError, match=r"cluster: 3\.weight: weights must be finite"):
        make_session(model, begin=0)


def test_detach_leaves_the_plain_model():
    model = make_net()
    keys = list(model.state_dict())
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    session.detach()
    assert list(model.state_dict()) == keys
    assert {type(module) for module in model} == {nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Tanh}
    opt.step()
