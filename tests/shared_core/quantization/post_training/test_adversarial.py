"""FGSM and PGD against closed forms in float64, on quantized models, and what they refuse."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from quantization_digits import batches, data, trained
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.quantization import convert, quantize
from shared_core.quantization.post_training.adversarial import adversarial_accuracy, fgsm, pgd

X, Y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])


def two_classes():
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        net.bias.zero_()
    return net


def logistic(z, y):
    return F.binary_cross_entropy_with_logits(z[:, 0], y, reduction="sum")


@pytest.fixture
def regression():
    """Logistic regression in float64; its loss rises along −sign(w) for y = 1 and along sign(w) for y = 0."""
    torch.manual_seed(0)
    net = nn.Linear(5, 1).double()
    x = torch.rand(6, 5, dtype=torch.float64)
    return net, x, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("attack", [
    lambda net, x, y: fgsm(net, x, y, 0.1, loss=logistic),
    lambda net, x, y: pgd(net, x, y, 0.1, 0.03, 7, loss=logistic),
    lambda net, x, y: pgd(net, x, y, 0.1, 0.03, 4, random_start=False, loss=logistic),
])  # fmt: skip
def test_on_a_linear_model_the_attack_is_the_sign_of_the_weights(regression, attack):
    net, x, y = regression
    w = net.weight.detach()[0]
    moved = attack(net, x, y)
    assert torch.allclose(moved, x - 0.1 * (2 * y - 1)[:, None] * w.sign(), atol=1e-15, rtol=0)
    # Goodfellow et al., section 5: the loss of the attacked example is ζ(ε‖w‖₁ − margin)
    margin = (2 * y - 1) * (x @ w + net.bias.detach())
    assert torch.allclose(logistic(net(moved), y), F.softplus(0.1 * w.abs().sum() - margin).sum(), atol=1e-12)


def test_no_corner_of_the_box_is_worse_than_the_attack(regression):
    net, x, y = regression
    low, high = 0.2, 0.9
    x = x.clamp(low, high)
    moved = pgd(net, x, y, 0.25, 0.1, 6, low=low, high=high, loss=logistic)
    corners = [
        (x + 0.25 * torch.tensor(signs, dtype=torch.float64)).clamp(low, high)
        for signs in itertools.product((-1, 1), repeat=5)
    ]
    losses = torch.stack([F.binary_cross_entropy_with_logits(net(c)[:, 0], y, reduction="none") for c in corners])
    reached = F.binary_cross_entropy_with_logits(net(moved)[:, 0], y, reduction="none")
    assert torch.allclose(reached, losses.max(0).values, atol=1e-14)


def test_pgd_goes_the_way_of_its_formula_step_by_step():
    class Bowl(nn.Module):
        def forward(self, x):
            return (x.square() - 0.8 * x).sum(1, keepdim=True)

    start = torch.tensor([[0.39, 0.41, 0.05, 0.97]], dtype=torch.float64)
    found = pgd(Bowl(), start, Y, 0.3, 0.07, 6, low=0, high=1, random_start=False, loss=lambda z, y: z.sum())
    expected = []
    for x0 in start[0].tolist():
        x = x0
        for _ in range(6):
            x += 0.07 if 2 * x - 0.8 > 0 else -0.07
            x = min(max(x, x0 - 0.3), x0 + 0.3)
            x = min(max(x, 0.0), 1.0)
        expected.append(x)
    assert torch.allclose(found, torch.tensor([expected], dtype=torch.float64), atol=1e-15, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bounds_hold_and_no_strength_is_the_identity(dtype):
    (images, labels), _ = data(0)
    x, y, net = images[:32].to(dtype), labels[:32], trained("cnn").to(dtype)
    try:
        slack = torch.finfo(dtype).eps
        for moved in (fgsm(net, x, y, 0.1, low=0, high=1), pgd(net, x, y, 0.1, 0.03, 5, low=0, high=1)):
            assert moved.dtype == dtype
            assert not moved.requires_grad
            assert (moved.double() - x.double()).abs().max() <= 0.1 + slack
            assert moved.min() >= 0
            assert moved.max() <= 1
            assert not torch.equal(moved, x)
        assert torch.equal(fgsm(net, x, y, 0.0), x)
        assert torch.equal(pgd(net, x, y, 0.0, 0.01, 3), x)
    finally:
        net.float()


def test_bounds_may_differ_by_channel(regression):
    net, x, y = regression
    eps = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    high = x.max(0).values + 0.05
    moved = pgd(net, x, y, eps, eps / 2 + 0.01, 6, high=high, loss=logistic)
    assert torch.equal(moved[:, 0], x[:, 0])
    assert bool(((moved - x).abs() <= eps + 1e-15).all())
    assert bool((moved <= high).all())
    assert bool(((moved - x)[:, 4].abs() > 0.3).any())


def test_a_bound_that_rounds_beside_the_inputs_moves_nothing():
    pixels = torch.tensor([[0.0, 1.0, 0.3]])
    x = (pixels - 0.485) / 0.229
    low, high = -0.485 / 0.229, (1 - 0.485) / 0.229
    for value in (low, torch.nextafter(torch.tensor(low), torch.tensor(0.0)).item()):
        net = nn.Linear(3, 2)
        assert torch.equal(fgsm(net, x, Y, 0.0, low=value, high=high), x)
        assert fgsm(net, x, Y, 0.5, low=value, high=high).min() >= low - 1e-6


def test_the_random_start_has_a_generator_of_its_own():
    x, y, net = torch.full((64, 8), 0.5), torch.zeros(64, dtype=torch.long), nn.Linear(8, 2)

    def start(**options):
        return pgd(net, x, y, 0.2, 1e-9, 1, **options) - x

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again = start(), start()
    other = start(generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.abs().max() <= 0.2 + 1e-6
    assert first.abs().mean() == pytest.approx(0.1, abs=0.01)  # uniform in ±0.2
    assert start(random_start=False).abs().max() < 1e-6


@pytest.mark.parametrize("surrounding", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_model_is_left_as_it_was(surrounding):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net[3].eval()
    net[0].weight.requires_grad_(False)
    net[3].weight.grad = torch.full((3, 8), 7.0)
    modes = [module.training for module in net.modules()]
    kept = {key: value.clone() for key, value in net.state_dict().items()}
    with surrounding():
        x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        moved = [fgsm(net, x, y, 0.1), pgd(net, x, y, 0.1, 0.05, 3)]
        adversarial_accuracy(net, [(x, y)], 0.1, steps=2)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, kept[key]) for key, value in net.state_dict().items())
    assert torch.equal(net[3].weight.grad, torch.full((3, 8), 7.0))
    assert net[0].weight.grad is None
    assert not net[0].weight.requires_grad
    assert x.grad is None
    assert all(not value.requires_grad for value in moved)


def test_outputs_with_logits_are_read():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = two_classes()

        def forward(self, pixel_values):
            return SimpleNamespace(hidden=None, logits=self.net(pixel_values))

    assert torch.equal(fgsm(Wrapped(), X, Y, 0.1), fgsm(two_classes(), X, Y, 0.1))


@pytest.mark.parametrize("scheme", ["int8", "int8_weight", "int8_dynamic", "fp8", "mxfp4"])
def test_a_gradient_passes_fake_quantization(scheme):
    net, (x, y) = trained("cnn"), data(0)[1]
    quantized = quantize(net, scheme, batches())
    found = adversarial_accuracy(quantized, [(x[:200], y[:200])], 0.1, attack="fgsm", low=0, high=1)
    assert found.without_gradient == 0
    assert found.adversarial < found.clean - 0.2


def test_stronger_attacks_leave_less():
    net, (x, y) = trained("cnn"), data(0)[1]
    parts = [(x[:150], y[:150]), (x[:0], y[:0]), (x[150:300], y[150:300])]
    found = [adversarial_accuracy(net, parts, eps, steps=10, low=0, high=1) for eps in (0.0, 0.03, 0.1, 0.3)]
    with torch.no_grad():
        clean = (net(x[:300]).argmax(1) == y[:300]).double().mean().item()
    assert all(each.clean == clean and each.examples == 300 and not each.transferred for each in found)
    assert found[0].adversarial == clean
    assert found[0].adversarial > found[1].adversarial > found[2].adversarial > found[3].adversarial
    one_step = adversarial_accuracy(net, parts, 0.1, attack="fgsm", low=0, high=1)
    assert found[2].adversarial <= one_step.adversarial < clean


def test_an_example_that_is_wrong_unchanged_stays_wrong():
    # the attack would push it over to the right class
    x, y = torch.tensor([[0.5, 0.4], [0.4, 0.5]]), torch.tensor([0, 0])
    found = adversarial_accuracy(two_classes(), [(x, y)], 0.01, attack="fgsm")
    assert (found.clean, found.adversarial) == (0.5, 0.5)


def test_an_integer_model_is_attacked_through_its_float_model():
    net, (x, y) = trained("cnn"), data(0)[1]
    x, y = x[:100], y[:100]
    integer = convert(quantize(net, "int8", batches()))
    for attack in (lambda: fgsm(integer, x, y, 0.1), lambda: pgd(integer, x, y, 0.1, 0.05, 2)):
        with pytest.raises(CompatibilityError, match="computes on integers; attack its float model"):
            attack()
    found = adversarial_accuracy(integer, [(x, y)], 0.1, source=net, low=0, high=1, steps=5)
    assert found.transferred
    assert found.adversarial < found.clean - 0.2


def test_a_gradient_that_is_lost_is_not_taken_for_strength():
    class Lost(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.net, self.how = two_classes(), how

        def forward(self, x):
            return self.net(self.how(x))

    with pytest.raises(CompatibilityError, match="differentiable"):
        fgsm(Lost(lambda x: x.detach()), X, Y, 0.1)
    with pytest.raises(CompatibilityError, match="zero for all 1 examples"):
        adversarial_accuracy(Lost(lambda x: (x * 16).round() / 16), [(X, Y)], 0.1)
    half = Lost(lambda x: torch.where(x > 0.5, x, (x * 16).round() / 16))
    found = adversarial_accuracy(half, [(torch.tensor([[0.2, 0.3], [0.9, 0.8]]), torch.tensor([0, 0]))], 0.1)
    assert found.without_gradient == 1


def test_a_gradient_of_nan_is_refused():
    net = two_classes()
    net.weight.data[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="gradient must be finite"):
        pgd(net, X, Y, 0.1, 0.05, 2)


@pytest.mark.parametrize(("call", "message"), [
    (lambda n: fgsm(n, X, Y, -0.1), "eps must be at least 0"),
    (lambda n: fgsm(n, X, Y, float("nan")), "eps must be at least 0"),
    (lambda n: fgsm(n, X.int(), Y, 0.1), "x must be floating point and finite, got torch.int32"),
    (lambda n: fgsm(n, X * torch.inf, Y, 0.1), "x must be floating point and finite"),
    (lambda n: fgsm(n, X, torch.tensor([0, 1]), 0.1), "x and y must be tensors"),
    (lambda n: fgsm(n, X, [0], 0.1), "x and y must be tensors .* list"),
    (lambda n: fgsm(n, X - 1, Y, 0.1, low=0, high=1), "x must lie between low and high"),
    (lambda n: fgsm(n, X, Y, 0.1, loss=lambda z, y: z), "loss must return a scalar"),
    (lambda n: pgd(n, X, Y, 0.1, 0.0, 2), "step must be above 0"),
    (lambda n: pgd(n, X, Y, 0.1, 0.1, 0), "steps must be in"),
    (lambda n: pgd(n, X, Y, 0.1, 0.1, True), "steps must be a whole number"),
    (lambda n: adversarial_accuracy(n, [], 0.1), "at least one example"),
    (lambda n: adversarial_accuracy(n, [(X, Y)], 0.1, attack="cw"), "attack must be one of fgsm, pgd"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises((ConfigError, RuntimeError), match=message):
        call(two_classes())
