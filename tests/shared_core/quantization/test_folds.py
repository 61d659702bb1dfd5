"""Batch norm in quantization-aware training: folded, frozen, saved plain, put back bit for bit, merged for integers."""

import copy

import pytest
import torch
from plain_loop import plain_step
from torch import nn

from shared_core.engine.session import Session
from shared_core.errors import MatchError
from shared_core.quantization import apply_ranges, convert
from shared_core.quantization.batch_norm import find_folds


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=inputs == 1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Its forward looks at values, so that only its blocks can be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(1, 4), Block(4, 4)
        self.alone = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        x = self.second(self.first(x))
        if x.sum() < 0:
            raise ValueError
        return self.head(self.alone(x.flatten(1)))


def make_net():
    torch.manual_seed(0)
    return Net()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return 1 + torch.randn(16, 1, 4, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def start(model, **options):
    session = Session({"qat": {"scheme": "int8", **options}})
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.begin([optimizer], total_steps=20)
    return session, optimizer


def train(session, optimizer, model, steps):
    model.train()
    for step in steps:
        x, labels = batch(step)
        plain_step(session, optimizer, nn.functional.cross_entropy(model(x), labels))


def test_blocks_of_an_untraceable_model_are_found():
    folds, left = find_folds(make_net(), "qat")
    assert folds == {"first.conv": "first.norm", "second.conv": "second.norm"}
    assert set(left) == {"alone"}


@pytest.mark.parametrize("options", [{}, {"range": "lsq"}, {"weight_bits": 4}, {"freeze_bn": 3}], ids=str)
def test_plain_weights_put_back_are_the_trained_model_bit_for_bit(options):
    model = make_net()
    keys = list(model.state_dict())
    session, optimizer = start(model, **options)
    train(session, optimizer, model, range(6))
    assert list(model.state_dict()) == keys
    x, _ = batch(99)
    with session.swapped("evaluate"), torch.no_grad():
        trained = model.eval()(x)
        twin = copy.deepcopy(model)
    integer, twin_codes = convert(twin)(x), convert(twin).first.conv.weight_codes
    session.finish()
    assert {type(module) for module in model.modules()} <= {
        Net,
        Block,
        nn.Conv2d,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.Linear,
    }
    assert list(model.state_dict()) == keys
    plain = make_net()
    plain.load_state_dict(model.state_dict())
    ranges = session.deployment()["qat"]["ranges"]
    assert ranges["first.conv"]["batch_norm"] == "..norm"
    with torch.no_grad():
        assert torch.equal(apply_ranges(copy.deepcopy(plain), ranges).eval()(x), trained)
        for converted in (convert(model), convert(plain, ranges)):
            assert torch.allclose(converted(x), integer, atol=1e-5)
            assert torch.equal(converted.first.conv.weight_codes, twin_codes)
            assert not [name for name, module in converted.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert torch.allclose(integer, trained, atol=1e-4)
    receipt = session.receipt()["techniques"]["qat"]
    assert [entry.get("batch_norm") for entry in receipt["per_layer"]] == ["..norm", "..norm", None]
    assert set(receipt["batch_norms_beside"]) == {"alone"}


def test_weight_codes_are_those_of_the_folded_weight():
    model = make_net()
    session, optimizer = start(model)
    train(session, optimizer, model, range(3))
    conv, norm = model.first.conv, model.first.norm
    factor = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach().double()
    folded = conv.weight.detach().double() * factor.view(-1, 1, 1, 1)
    scale = folded.abs().amax((1, 2, 3), keepdim=True) / 127
    session.finish()
    baked = conv.weight.detach().double() * factor.view(-1, 1, 1, 1) / scale
    assert torch.allclose(baked, (folded / scale).round(), atol=1e-3)


def test_frozen_statistics_stay():
    model = make_net()
    session, optimizer = start(model, freeze_bn=2)
    train(session, optimizer, model, range(2))
    before = model.first.norm.running_mean.clone()
    train(session, optimizer, model, range(2, 4))
    assert torch.equal(model.first.norm.running_mean, before)
    assert not torch.equal(model.alone.running_mean, torch.zeros(64))


def test_without_quantisation_a_folded_model_trains_like_the_plain_one():
    plain, folded = make_net(), make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    session, other = start(folded, begin=1.0)
    for step in range(4):
        x, labels = batch(step)
        plain.train()
        nn.functional.cross_entropy(plain(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(session, other, folded, range(4))
    for (name, one), (_, two) in zip(plain.state_dict().items(), folded.state_dict().items(), strict=True):
        assert torch.allclose(one, two, atol=1e-5), name


def test_a_dead_channel_keeps_its_weight():
    model = make_net()
    model.first.norm.weight.data[1] = 0
    session, _ = start(model)
    weight = model.first.conv.weight.detach().clone()
    session.finish()
    assert torch.equal(model.first.conv.weight[1], weight[1])
    assert torch.isfinite(model.first.conv.weight).all()


def test_it_can_be_switched_off_and_a_wrong_name_is_refused():
    model = make_net()
    session, optimizer = start(model, fold_batch_norm=False)
    assert type(model.first.norm) is nn.BatchNorm2d
    train(session, optimizer, model, range(1))
    session.finish()
    entry = session.deployment()["qat"]["ranges"]["first.conv"]
    with pytest.raises(MatchError, match=r"batch_norm of first.conv must be .* got 'first.nrm'"):
        apply_ranges(make_net(), {"first.conv": {**entry, "batch_norm": "..nrm", "weight_scale": [1.0] * 4}})
