"""DP-SGD: clipped sums and noise against their definitions, refusals, resume, two processes."""

import copy
import importlib
import math

import pytest
import torch
from privacy_runs import Run, net, steps_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core import Recipe, Session, training
from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import whole
from shared_core.engine.checks.compatibility import check, remarks
from shared_core.errors import CompatibilityError, EffError, MatchError, TrainingError
from shared_core.privacy.accountant import epsilon
from shared_core.privacy.per_sample_gradients import (
    ExampleGradients,
    PerSample,
    Use,
    check_model,
    clip_factors,
    ghost_squares,
)
from shared_core.privacy.sampling import Secret


def test_a_micro_batch_that_no_example_fell_into_holds_a_row_that_does_not_count():
    run = Run(nn.Linear(3, 2), num_examples=40, batch_size=1, noise_multiplier=0.0)
    empty = next(step for step in range(50) if not len(run.technique._batches.chosen(step)))
    run.technique._draws = empty
    assert next(iter(run.technique._batches)) == [0]
    run.step(empty)
    assert all(not parameter.grad.any() for parameter in run.model.parameters())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_the_clipped_sum_is_that_of_a_loop_over_examples(accumulate, mode):
    run = Run(net(), accumulate=accumulate, noise_multiplier=0.0, max_grad_norm=2.0, grad_sample_mode=mode)
    for step in range(2):
        run.step(step)
        found = [parameter.grad.clone() for parameter in run.model.parameters()]
        for gradient, expected in zip(found, run.oracle(step, 2.0), strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-13, rtol=1e-12)
        run.optimizer.zero_grad()


def test_noise_has_the_accounted_width_once_a_step_however_it_is_accumulated():
    found = []
    for accumulate in (1, 4):
        model = nn.Sequential(nn.Linear(3, 2), nn.Identity())
        model[1].unused = nn.Linear(200, 200, bias=False)
        run = Run(model, batch_size=8 // accumulate, accumulate=accumulate, noise_multiplier=0.7, max_grad_norm=1.5)
        noise = []
        for step in range(2):
            run.step(step)
            noise.append(model[1].unused.weight.grad.flatten())
            run.optimizer.zero_grad()
        found.append(noise)
        for values in noise:
            width = 0.7 * 1.5 / 8
            assert abs(float(values.std()) / width - 1) < 3 / math.sqrt(2 * 40_000)
            assert abs(float(values.mean())) < 3 * width / math.sqrt(40_000)
        assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.015
    assert torch.equal(found[0][0], found[1][0])


def test_an_example_that_is_not_finite_counts_as_nothing():
    layer = nn.Linear(2, 1, bias=False)
    samples = torch.tensor([[[math.nan, 1.0]], [[math.inf, 0.0]], [[0.3, 0.4]]])
    norms = samples.flatten(1).norm(dim=1)
    uses = [Use(layer, samples[:, 0], torch.ones(3, 1))]
    for kept in (ExampleGradients(norms, samples), ExampleGradients(norms, None, uses)):
        found = kept.weighted_sum(clip_factors(norms, torch.ones(3), 10.0), all_finite=False)
        assert torch.equal(found, torch.tensor([[0.3, 0.4]]))
        assert not kept.weighted_sum(clip_factors(norms, torch.zeros(3), 10.0), all_finite=False).any()


class Tied(nn.Module):
    """Embedding and head share a weight; positions are looked up once for the whole batch."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 16), nn.Embedding(5, 16)
        self.twice, self.head = nn.Linear(16, 16), nn.Linear(16, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        hidden = self.words(ids) + self.places(torch.arange(2)[None])
        return self.head(self.twice(torch.tanh(self.twice(hidden))))


def test_tied_weights_reused_layers_and_shared_positions_have_gradients_of_single_examples():
    torch.manual_seed(0)
    model, ids = Tied().double(), torch.randint(0, 7, (3, 2))
    per_sample = PerSample(model, False)
    per_sample.num_examples = 3
    found = []
    for example in torch.eye(3, dtype=torch.double):
        model.zero_grad()
        model(ids).square().sum().backward()
        assert all(per_sample.ghosts[name] != ("bias" in name) for name in per_sample.ghosts)
        found.append(dict(per_sample.clipped_sums(example, 1e9)))
    per_sample.remove()
    for index in range(3):
        model.zero_grad()
        model(ids[index : index + 1]).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[index][name], parameter.grad)


class Temperature(nn.Module):
    """Scales by a parameter that is a single number, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return x * self.log.exp()


class Spectrum(nn.Module):
    """Scales frequencies by complex weights, as Fourier operators do."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=self.width)


class Unusual(nn.Module):
    """What Opacus has no fitting rule for: padding in circles, complex weights, a single number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.circle = nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular").double()
        self.spectrum, self.temperature = Spectrum(3), Temperature().double()
        self.head = nn.Linear(6, 2).double()

    def forward(self, x):
        return self.head(self.temperature(self.spectrum(self.circle(x.unsqueeze(1)))).flatten(1))


class Words(nn.Sequential):
    """An embedding, what follows it, and a head that may share the embedding's weight and may be called twice."""

    def __init__(self, rows, width, tied=False, times=1, frozen=()):
        super().__init__(nn.Embedding(rows, width), nn.LayerNorm(width), nn.Linear(width, rows))
        self.times = times
        if tied:
            self[2].weight = self[0].weight
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, ids):
        hidden = self[1](self[0](ids))
        for _ in range(self.times - 1):
            hidden = self[1](hidden + self[2](hidden)[..., : hidden.shape[-1]])
        return self[2](hidden)


def images(*layers):
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten())


IDS, PIXELS, SIGNAL = torch.arange(20).reshape(4, 5) % 7, torch.ones(4, 6, 5, 5), torch.ones(4, 6, 9)


@pytest.mark.parametrize(
    ("make", "inputs", "ghosts"),
    [
        (lambda: nn.Linear(9, 9), torch.ones(4, 9), {"weight"}),
        (lambda: nn.Linear(6, 6), torch.ones(4, 2, 2, 6), set()),
        (lambda: nn.Linear(20, 20), torch.ones(4, 2, 2, 20), {"weight"}),
        (lambda: Words(12, 8), IDS, {"0.weight"}),
        (lambda: Words(12, 8, tied=True), IDS, set()),
        (lambda: Words(40, 24), IDS, {"0.weight", "2.weight"}),
        (lambda: Words(4, 24), IDS % 4, set()),
        (lambda: Words(90, 24, tied=True), IDS, {"0.weight"}),
        (lambda: Words(90, 24, times=3), IDS, {"0.weight", "2.weight"}),
        (lambda: Words(40, 24, times=4), IDS, {"0.weight"}),
        (lambda: Words(90, 24, tied=True, times=2), IDS, {"0.weight"}),
        (lambda: Words(40, 24, frozen=("0.weight", "2.bias")), IDS, {"2.weight"}),
        (lambda: Words(40, 24, frozen=("2.weight",)), IDS, {"0.weight"}),
        (lambda: images(nn.Conv2d(6, 12, 3, stride=2)), PIXELS, {"0.weight"}),
        (lambda: images(nn.Conv2d(6, 30, (2, 3), padding=(1, 2), stride=3, dilation=(2, 1))), PIXELS, {"0.weight"}),
        (lambda: images(nn.Conv2d(6, 3, 3, padding="same")), PIXELS, set()),
        (lambda: images(nn.Conv2d(6, 12, 3, stride=2, groups=3)), PIXELS, set()),
        (lambda: images(nn.Conv1d(6, 20, 4, padding="same", dilation=2)), SIGNAL, {"0.weight"}),
        (lambda: images(nn.Conv1d(6, 20, 4, padding=1, stride=2, bias=False)), SIGNAL, {"0.weight"}),
        (lambda: images(nn.Conv1d(6, 2, 3)), SIGNAL, set()),
        (lambda: images(nn.Conv2d(6, 12, 3, padding=(1, 0), stride=2, padding_mode="reflect")), PIXELS, {"0.weight"}),
        (lambda: images(nn.Conv2d(6, 3, 2, padding="same", padding_mode="circular")), PIXELS, set()),
        (lambda: images(nn.Conv1d(6, 20, 4, padding="same", padding_mode="replicate")), SIGNAL, {"0.weight"}),
        (lambda: images(nn.Conv1d(6, 9, 3, padding=2, groups=3, padding_mode="circular")), SIGNAL, set()),
        (lambda: images(nn.Conv2d(6, 6, 3, padding=1, groups=6, padding_mode="reflect")), PIXELS, set()),
        (lambda: images(nn.Conv3d(6, 2, 3, padding=1, padding_mode="replicate")), SIGNAL.view(4, 6, 1, 3, 3), set()),
        (lambda: nn.Sequential(nn.LayerNorm(9, bias=False), nn.Linear(9, 2)), SIGNAL, set()),
        (lambda: nn.Sequential(nn.Linear(9, 9), Temperature()), torch.ones(4, 9), {"0.weight"}),
        (Temperature, SIGNAL, set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_sums_are_those_of_single_examples_with_and_without_their_gradients(make, inputs, ghosts, dtype):
    torch.manual_seed(0)
    model = make().to(dtype)
    check_model(model)
    inputs = torch.randn_like(inputs, dtype=dtype) if inputs.is_floating_point() else inputs
    per_sample, found, expected = summed(model, inputs)
    assert {name for name, is_ghost in per_sample.ghosts.items() if is_ghost} == ghosts
    assert per_sample.ghosts.keys() == found.keys() == expected.keys()
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-10}
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, **near)


def summed(model, inputs, functorch=False):
    """Return the hooks of a model, its clipped sums, and those of a loop over examples."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    expected, scale = {name: torch.zeros_like(value) for name, value in trained.items()}, torch.tensor([1, 0.5, 0, 2])
    for row, factor in zip(inputs, scale, strict=True):
        found = torch.autograd.grad(factor * model(row[None]).abs().square().sum(), list(trained.values()))
        size = torch.cat([part.flatten().abs() for part in found]).norm()
        for total, part in zip(expected.values(), found, strict=True):
            total += part * (3 / size).clamp(max=1)
    per_sample = PerSample(model, functorch)
    per_sample.num_examples = 4
    model(inputs).abs().square().sum().backward()
    found = dict(per_sample.clipped_sums(scale.to(next(iter(trained.values())).dtype.to_real()), 3.0))
    per_sample.remove()
    return per_sample, found, expected


@pytest.mark.parametrize("functorch", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(Spectrum(9), nn.Linear(9, 2)),
        lambda: nn.Linear(9, 3, dtype=torch.complex128),
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3, groups=2, dtype=torch.complex128), nn.Flatten()),
    ],
)
def test_both_parts_of_complex_gradients_are_clipped(model, functorch):
    torch.manual_seed(0)
    model = model()
    kind = torch.complex128 if next(model.parameters()).is_complex() and len(list(model.parameters())) == 2 else None
    model = model if kind else model.apply(lambda layer: layer.double() if isinstance(layer, nn.Linear) else layer)
    check_model(model, functorch)
    _, found, expected = summed(model, torch.randn(4, 6, 9, dtype=kind or torch.double), functorch)
    for name, total in expected.items():
        assert total.is_complex() == model.get_parameter(name).is_complex()
        torch.testing.assert_close(found[name], total, atol=1e-12, rtol=1e-10)


def test_a_norm_that_positions_cancel_in_is_not_told_too_small():
    torch.manual_seed(0)
    inputs, outputs = (
        torch.randn(1, 40) + 1e-4 * torch.randn(6, 2, 40),
        torch.randn(6, 1, 40) * torch.tensor([[1], [-1]]),
    )
    use = Use(nn.Linear(40, 40), inputs, outputs)
    truth = Use(use.layer, inputs.double(), outputs.double()).samples().flatten(1).norm(dim=1)
    assert (ghost_squares([use]) >= truth.square()).all()


class Padded(nn.Module):
    """Looks words up, of which one is padding, and reads them in their own length from states of its own."""

    def __init__(self, padding=0, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4, padding_idx=padding, **options)
        layers = importlib.import_module("opacus.layers")
        self.lstm, self.gru = layers.DPLSTM(4, 3, 2, batch_first=True), layers.DPGRU(3, 3)

    def forward(self, ids):
        words = self.words(ids)
        start = words.sum((1, 2)).expand(2, -1)[..., None].expand(-1, -1, 3)
        lengths = (ids != 6).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(packed, (start, start.tanh()))
        hidden, _ = nn.utils.rnn.pad_packed_sequence(hidden, total_length=ids.shape[1])
        return self.gru(hidden, start[:1])[0][-1]


@pytest.mark.parametrize(
    ("options", "functorch"), [({}, False), ({}, True), ({"padding": -7}, False), ({"sparse": True}, False)]
)
def test_padding_and_packed_sequences_have_the_gradients_of_single_examples_in_their_order(options, functorch):
    model = Padded(**options).double()
    ids = torch.tensor([[1, 0, 6, 6], [0, 2, 0, 5], [3, 6, 6, 6], [4, 1, 0, 6]])
    check_model(model, functorch)
    twin = copy.deepcopy(model)
    per_sample = PerSample(model, functorch)
    per_sample.num_examples = 4
    for index, example in enumerate(torch.eye(4, dtype=torch.double)):
        model.zero_grad()
        model(ids).square().sum().backward()
        found = dict(per_sample.clipped_sums(example, 1e9))
        assert not found["words.weight"][0].any()
        twin.zero_grad()
        twin(ids[index : index + 1]).square().sum().backward()
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad.to_dense(), atol=1e-13, rtol=1e-12)
    per_sample.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


class Cell(nn.Module):
    """A step of a network of the user's own, from a state."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x, state=None):
        return x @ self.weight + (state[0] if state else 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda cell, x: cell(x, (x, x)),
        lambda cell, x: cell(x, x),
        lambda cell, x: cell(x, state=(x, x)),
        lambda cell, x: cell(x=x),
    ],
)
def test_a_layer_without_a_rule_that_gets_a_state_is_refused_by_name(call):
    cell = Cell()
    per_sample = PerSample(nn.Sequential(cell), False)
    with pytest.raises(TrainingError, match=r"0\.weight must .* one tensor as positional input"):
        call(cell, torch.ones(3, 4))
    per_sample.remove()


class Router(nn.Module):
    """Returns two tensors, as a router of experts does, of which the first may not be used."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        scores = x @ self.weight.T
        return scores, scores.softmax(1)


class Routed(nn.Sequential):
    def forward(self, x):
        return self[1](x)[1] * self[0](x)


def test_a_layer_without_a_rule_that_gives_several_tensors_is_refused_by_name():
    model = Routed(nn.Linear(4, 2), Router())
    per_sample = PerSample(model, False)
    with pytest.raises(TrainingError, match=r"1\.weight must .* one tensor as output, got 2"):
        model(torch.ones(3, 4)).sum().backward()
    per_sample.remove()


def test_nothing_is_left_on_the_model():
    model = net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    run = Run(model, noise_multiplier=1.0)
    run.step(0)
    assert list(model.state_dict()) == keys
    run.session.finish()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model[1].inplace
    assert not any(module._forward_hooks or module._backward_hooks or module._forward_pre_hooks for module in model)
    assert not any(vars(parameter) for parameter in model.parameters())


class Loose(nn.Module):
    """Uses the weight of a layer past the layer, in place of it (`also` None) or beside it."""

    def __init__(self, also=None):
        super().__init__()
        self.layer, self.also = nn.Linear(3, 2), also

    def forward(self, x):
        past = nn.functional.linear(x, self.layer.weight)
        return past if self.also is None else self.layer(x) + past * self.also


class Buffered(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(1))


class Token(nn.Module):
    """A token of its own before a layer that holds a constant."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 3))
        self.inner = nn.Module()
        self.inner.register_buffer("places", torch.arange(3))


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), CompatibilityError, r"1 \(BatchNorm1d\).*GroupNorm"),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).requires_grad_(False)), CompatibilityError, "BatchNorm"),
        (nn.LSTM(3, 4), CompatibilityError, "LSTM"),
        (nn.RNN(3, 4), CompatibilityError, "DPRNN"),
        (nn.GRUCell(3, 4), CompatibilityError, "DPGRUCell"),
        (nn.Embedding(3, 4, max_norm=1.0), CompatibilityError, "max_norm"),
        (nn.Embedding(3, 4, scale_grad_by_freq=True), CompatibilityError, "scale_grad_by_freq"),
        (nn.EmbeddingBag(3, 4), CompatibilityError, r"EmbeddingBag\) has no rule"),
        (Buffered(), CompatibilityError, "buffers"),
        (nn.Sequential(Token()), CompatibilityError, r"0 \(Token\) .* buffers"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), CompatibilityError, "computes its weight .* buff"),
        (nn.utils.parametrizations.orthogonal(nn.Linear(3, 2)), CompatibilityError, "remove_parametrizations first"),
        (nn.utils.weight_norm(nn.Linear(3, 2)), CompatibilityError, "use torch.nn.utils.parametrizations.weight_norm"),
        (nn.Linear(3, 2).bfloat16(), CompatibilityError, "would round the noise"),
        (nn.Linear(3, 2).requires_grad_(False), MatchError, "must have a trainable parameter"),
    ],
)
def test_models_without_gradients_of_single_examples_are_refused_by_name(model, error, says):
    with pytest.raises(error, match=says):
        check_model(model)


def test_the_reason_of_many_layers_is_told_once_in_one_line():
    norms = nn.Sequential(*(nn.BatchNorm1d(width) for width in range(1, 9)), nn.Linear(8, 8))
    with pytest.raises(CompatibilityError) as refused:
        check_model(norms)
    told = str(refused.value)
    assert told.count("GroupNorm") == 1
    assert "\n" not in told
    assert told.endswith("(also 1 (BatchNorm1d), 2 (BatchNorm1d), 3 (BatchNorm1d) and 4 more)")


def one_batch_too_many(run):
    for micro_batch in (0, 1, 1):
        run.backward(0, micro_batch)


def one_batch_too_few(run):
    run.backward(0, 0)
    run.session.before_step()


@pytest.mark.parametrize(
    ("model", "act", "words"),
    [
        (Loose, lambda run: run.step(0), r"layer\.weight must get its gradient through .* own module"),
        (
            lambda: nn.Linear(3, 2),
            lambda run: run.session.loss(run.loss(run.x, run.y)).backward(),
            "must get a gradient from each of the",
        ),
        (lambda: nn.Linear(3, 2), one_batch_too_few, "must have .*2 micro-batches"),
        (lambda: nn.Linear(3, 2), one_batch_too_many, "got more"),
    ],
    ids=["past its module", "other rows", "too few", "too many"],
)
def test_steps_that_are_not_of_the_drawn_examples_stop_the_run(model, act, words):
    run = Run(model(), accumulate=2, noise_multiplier=1.0)
    with pytest.raises(TrainingError, match=words):
        act(run)


@pytest.mark.parametrize(
    "other",
    [
        {"prune": {"sparsity": 0.5, "criterion": "taylor"}},
        {"prune": {"sparsity": 0.5, "dynamic": "rigl", "schedule": "one_shot", "criterion": "random"}},
        {"distill": {"teacher": "mutual"}},
        {"distill": {"teacher": "somewhere", "hidden": ["*=hidden"]}},
        {"qat": {"scheme": "int8"}},
        {"loss_scale": {"kind": "dynamic"}},
        {"low_rank": {"rank": 1, "decomposition": "scaled"}},
        {"activations": {"pack": "int8"}},
    ],
    ids=str,
)
def test_what_sees_the_data_past_the_noise_is_refused(other):
    with pytest.raises(CompatibilityError, match="dp"):
        Session({"dp": {"noise_multiplier": 1.0}, **other}).attach(nn.Linear(3, 2))


def test_what_is_outside_the_guarantee_is_told():
    recipe = {"dp": {"noise_multiplier": 1.0}, "distill": {"teacher": "x"}, "soup": {"kind": "greedy", "metric": "a"}}
    check(Recipe.from_dict(recipe))
    allowed = {"prune": {"sparsity": 0.5}, "low_rank": {"rank": 1}, "activations": {"pack": "exact"}}
    check(Recipe.from_dict({"dp": {"noise_multiplier": 1.0}, **allowed}))
    assert [("teacher" in line, "validation" in line) for line in remarks(Recipe.from_dict(recipe))] == [
        (True, False),
        (False, True),
    ]


def test_a_stopped_run_goes_on_bit_for_bit_also_inside_a_step():
    def run():
        return Run(net(), accumulate=2, noise_multiplier=0.9)

    whole = run()
    for step in range(3):
        whole.step(step)
        whole.optimizer.step()
        whole.session.after_step()
        whole.optimizer.zero_grad()
    whole.backward(3, 0)
    state, weights = whole.session.state_dict(), {k: v.clone() for k, v in whole.model.state_dict().items()}
    whole.backward(3, 1)
    whole.session.before_step()
    again = run()
    again.technique._secret = Secret(b"another one here")
    again.model.load_state_dict(weights)
    again.session.load_state_dict(state)
    again.begin()
    again.backward(3, 1)
    again.session.before_step()
    for first, second in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    assert again.session.figures() == whole.session.figures()
    # what was spent later is not forgotten when an earlier checkpoint is the best one
    whole.session.load_state_dict({**state, "techniques": {"dp": {**state["techniques"]["dp"], "draws": 2}}})
    assert whole.technique.report()["steps"] == 4
    saved = {**state["techniques"]["dp"], "processes": 2}
    with pytest.raises(EffError, match="between two steps to resume with 1 processes"):
        again.technique.restore(saved)
    with pytest.raises(EffError, match="must be one that dp saved"):
        again.technique.restore({"draws": 1})
    with pytest.raises(EffError, match="whose steps no epsilon covers"):
        run().session.load_state_dict({**state, "techniques": {}})


@pytest.mark.slow
def test_a_target_is_met_by_the_end_and_the_receipt_names_everything():
    run = Run(net(), target_epsilon=9.0, steps=3)
    for step in range(3):
        run.step(step)
        run.session.after_step()
        run.optimizer.zero_grad()
    told = run.technique.report()
    assert 8.8 < told["epsilon"] <= 9.0
    assert (told["accountant"], told["sampling"], told["delta"], told["sample_rate"]) == ("rdp", "poisson", 1e-3, 0.2)
    assert (told["expected_batch"], told["steps"]) == (8, 3)
    by_example = ["0.bias", "2.bias", "2.weight", "3.bias"]
    assert (told["norms_by_ghost"], told["norms_by_example"]) == (["0.weight", "3.weight"], by_example)
    assert run.session.figures()["dp/epsilon"] == told["epsilon"]
    assert run.session.receipt()["unreached"] == {}
    # a step after the planned ones is counted, and more than the target is told
    run.step(3)
    run.session.after_step()
    spent = epsilon([(told["noise_multiplier"], 0.2, 4)], 1e-3, "rdp")
    assert run.technique.report()["epsilon"] == spent > 9.0
    assert run.session.receipt()["unreached"] == {"dp": f"epsilon {spent:.4g} was spent, not 9"}


def test_without_a_seed_no_two_runs_draw_alike():
    first, second = (Run(nn.Linear(3, 2), noise_multiplier=1.0, seed=None) for _ in range(2))
    assert first.technique._secret.key != second.technique._secret.key


def test_a_plain_loop_trains_on_the_loader_that_it_gets():
    data, model = TensorDataset(torch.randn(40, 3)), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"total_steps": 5, "loader": DataLoader(data, batch_size=4), "accumulate": 2}
    with training({"dp": {"noise_multiplier": 1.0, "delta": 1e-3}}, model, optimizer, **given) as loop:
        for number, (batch,) in enumerate(loop.loader, 1):
            loop.backward(model(batch).square().sum(1).mean() / 2)
            if number % 2 == 0:
                loop.step()
                optimizer.zero_grad()
    report = loop.session.receipt().values["techniques"]["dp"]
    assert (report["steps"], report["expected_batch"], report["examples"]) == (5, 8, 40)


def test_no_noise_is_told_as_no_privacy():
    run = Run(nn.Linear(3, 2), noise_multiplier=0.0)
    run.step(0)
    assert run.technique.report()["epsilon"] == "infinite"
    assert run.session.figures() == {}


def test_a_loss_that_is_no_mean_over_examples_is_refused():
    run = Run(nn.Linear(3, 2), noise_multiplier=1.0)
    run.technique.check_loss(2.0, [(3, 1.0), (1, 5.0)])
    with pytest.raises(CompatibilityError, match="loss must be the mean"):
        run.technique.check_loss(2.0, [(2, 1.0), (2, 5.0)])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return saved_by_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


def test_two_processes_make_one_draw_and_add_noise_once(ranks):
    first, second = ranks
    one = steps_of(Run(net(), batch_size=8, noise_multiplier=0.5))
    assert first["key"] == second["key"]
    for name, weight in one.items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], weight, atol=1e-12, rtol=0)


def test_sharded_examples_are_clipped_by_their_norm_over_all_parts(ranks):
    for rank in ranks:
        for gradient, expected in zip(rank["sharded"], rank["oracle"], strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-13, rtol=1e-12)


def test_noise_on_each_part_has_the_accounted_width_and_is_no_other_parts(ranks):
    width, parts = 0.7 * 1.5 / 8, [part for rank in ranks for part in rank["noise"]]
    assert [len(part) for part in parts] == [20_000] * 4
    for part in parts:
        assert abs(float(part.std()) / width - 1) < 3.5 / math.sqrt(2 * 20_000)
        assert abs(float(part.mean())) < 3.5 * width / math.sqrt(20_000)
    correlation = torch.corrcoef(torch.stack(parts))  # two processes, two steps
    assert float((correlation - torch.eye(4)).abs().max()) < 4 / math.sqrt(20_000)


def test_unusual_layers_have_the_gradients_of_single_examples_under_ddp(ranks):
    for rank in ranks:
        for gradient, expected in zip(rank["unusual"], rank["unusual_oracle"], strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-13, rtol=1e-12)


def test_noise_is_on_both_parts_of_complex_weights(ranks):
    width = 0.7 * 1.5 / 8
    first, second = (rank["complex_noise"] for rank in ranks)
    assert torch.equal(first, second)
    for values in (first.real, first.imag):
        assert abs(float(values.std()) / width - 1) < 3.5 / math.sqrt(2 * len(first))
    correlation = torch.corrcoef(torch.stack([first.real, first.imag]))
    assert abs(float(correlation[0, 1])) < 4 / math.sqrt(len(first))


def test_gradients_are_checked_on_every_process_and_all_of_them_stop(ranks):
    for rank in ranks:
        for told in rank["unfit"]:  # whole and sharded
            assert "gradients of single examples must sum to the gradient of layer.weight" in told


def test_a_save_before_the_first_step_is_no_step_of_the_optimizer(ranks):
    for rank in ranks:
        alone, *others = rank["early"]
        assert alone["counts"] == [1.0] * len(alone["counts"])
        for other in others:
            assert other["counts"] == alone["counts"]
            assert all(torch.equal(value, other["weights"][name]) for name, value in alone["weights"].items())


def saved_between_micro_batches(saves, state=None):
    """Return what Adam counts and makes in a first step, where its state was saved or loaded between its micro-batches.

    Nothing has a gradient there, and torch steps an optimizer without gradients and state to have one to save.
    """
    run = Run(net(), batch_size=2, accumulate=2, noise_multiplier=0.5, shard=shard, optimizer=torch.optim.AdamW)
    run.backward(0, 0)
    saved = {}
    if saves:
        with run.session.swapped("checkpoint"):
            saved = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer))
    if state:
        set_optimizer_state_dict(run.model, run.optimizer, state)
    run.backward(0, 1)
    run.session.before_step()
    run.optimizer.step()
    weights = {name: whole(value).detach() for name, value in run.model.state_dict().items()}
    return {"weights": weights, "counts": [float(state["step"]) for state in run.optimizer.state.values()]}, saved


def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[-1], model):
        fully_shard(module, mesh=mesh)


def work(rank, folder):
    weights = steps_of(Run(net(), batch_size=4, noise_multiplier=0.5))
    alone = Run(net(), noise_multiplier=1.0, seed=None)
    sharded = Run(net(), batch_size=2, accumulate=2, noise_multiplier=0.0, max_grad_norm=2.0, shard=shard)
    sharded.step(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Identity())
    model[1].unused = nn.Linear(200, 200, bias=False)
    noised = Run(model, batch_size=2, accumulate=2, noise_multiplier=0.7, max_grad_norm=1.5, shard=shard)
    noise = []
    for step in range(2):
        noised.step(step)
        noise.append(local_part(model[1].unused.weight.grad).flatten())
        noised.optimizer.zero_grad()
    unusual = Run(Unusual(), batch_size=4, noise_multiplier=0.0, max_grad_norm=2.0)
    ddp = nn.parallel.DistributedDataParallel(unusual.model)
    unusual.loss = lambda x, y, model=ddp: (model(x) - y).square().sum(1).mean()
    unusual.step(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Identity())
    model[1].unused = nn.Parameter(torch.zeros(20_000, dtype=torch.complex64))
    drawn = Run(model, batch_size=4, noise_multiplier=0.7, max_grad_norm=1.5)
    drawn.step(0)
    unfit = []
    for sharding in (lambda model: None, fully_shard):
        with pytest.raises(TrainingError) as refused:
            Run(Loose(also=rank == 1), batch_size=4, noise_multiplier=0.0, shard=sharding).step(0)
        unfit.append(str(refused.value))
    saved, state = saved_between_micro_batches(True)
    early = [saved_between_micro_batches(False)[0], saved, saved_between_micro_batches(False, state)[0]]
    return {
        "early": early,
        "weights": weights,
        "key": alone.technique._secret.key.hex(),
        "sharded": [whole(parameter.grad) for parameter in sharded.model.parameters()],
        "oracle": sharded.oracle(0, 2.0),
        "noise": noise,
        "unusual": [parameter.grad for parameter in unusual.model.parameters()],
        "unusual_oracle": Run.oracle(unusual, 0, 2.0),
        "complex_noise": model[1].unused.grad,
        "unfit": unfit,
    }


if __name__ == "__main__":
    be_a_rank(work)
