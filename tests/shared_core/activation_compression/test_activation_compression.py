"""Packing through autograd's hooks: exact gradients, identity of memory, what is left alone, in-place changes."""

import pytest
import torch
from saved_runs import gradients, packed
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shared_core.activation_compression.saved_tensors import HeldMemory
from shared_core.errors import TrainingError


class FirstOf(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Mixed(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = torch.relu(self.a(x))
        other = self.b(x)  # saved between the two that save h
        return (self.c(h) + h * other).relu_()


def images(channels_last=False):
    x = torch.randn(4, 3, 16, 16)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def convolutional(pool):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), pool, nn.Dropout2d(0.3), nn.Conv2d(8, 8, 3),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(288, 32), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(32, 10),
    )  # fmt: skip


def encoder(**options):
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, **options)


NETS = {
    "max-pool": lambda: (convolutional(nn.MaxPool2d(2)), images()),
    "average-pool": lambda: (convolutional(nn.AvgPool2d(2)), images()),
    "channels-last": lambda: (convolutional(nn.MaxPool2d(2)).to(memory_format=torch.channels_last), images(True)),
    "relu-encoder": lambda: (encoder(), torch.randn(4, 9, 16)),
    "autocast": lambda: (Mixed(encoder()), torch.randn(4, 9, 16)),
    "gelu-encoder": lambda: (encoder(activation="gelu", norm_first=True), torch.randn(4, 9, 16)),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(50, 16, padding_idx=0), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)),
        torch.randint(0, 50, (4, 9)),
    ),
    "lstm": lambda: (FirstOf(nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)), torch.randn(3, 5, 8)),
    "residual": lambda: (Residual(), torch.randn(6, 32)),
    "float64": lambda: (Residual().double(), torch.randn(6, 32).double()),
    "bfloat16": lambda: (Residual().bfloat16(), torch.randn(6, 32).bfloat16()),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", NETS)
def test_exact_gradients_are_the_same_to_the_bit(name):
    net, x = NETS[name]()
    plain, _ = gradients(net, x, pack=None)
    ours, counts = gradients(net, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert counts.kinds
    assert 0 < counts.share_saved < 1


def test_which_form_each_kind_of_layer_takes():
    _, counts = gradients(*NETS["max-pool"]())
    assert counts.kinds == {"bitmap", "integers", "sign", "two_values"}
    told = counts.report()["kinds"]
    # relu -> flatten -> dropout and relu -> dropout; the first relu's result is max-pool's input as well
    assert told["sign"]["tensors"] == 2
    assert told["sign"]["bytes_before"] == 4 * (4 * 288 + 4 * 32)
    assert told["sign"]["bytes_after"] == 4 * 288 // 8 + 4 * 32 // 8
    assert told["integers"] == {"tensors": 1, "bytes_before": 8 * 4 * 8 * 64, "bytes_after": 4 * 8 * 64}
    assert counts.left_alone().count("weights") == 1


def test_memory_that_two_save_is_packed_once():
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Flatten(0), nn.Linear(192, 4))
    _, counts = gradients(net, torch.randn(6, 32))
    assert counts.report()["kinds"]["bitmap"]["tensors"] == 1  # relu's result and, as a view, the next layer's input
    assert counts.report()["saved_again"] >= 1
    assert "sign" not in counts.kinds


@pytest.mark.parametrize("pack", ["bf16", "int8"])
def test_rounded_gradients_are_close_and_the_loss_is_untouched(pack):
    net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), images()
    x = x.view(-1, 64)
    plain, _ = gradients(net, x, pack=None)
    ours, counts = gradients(net, x, pack=pack)
    assert any(kind.endswith(pack) for kind in counts.kinds)
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
    assert not torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_mean_of_int8_gradients_is_the_gradient(kind):
    layers = [nn.Linear(16, 8), nn.Linear(8, 4)] if kind == "linear" else [nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)]
    net, x = nn.Sequential(*layers), torch.randn(6, 16) if kind == "linear" else torch.randn(2, 2, 8, 8)
    exact, _ = gradients(net.double(), x.double(), pack=None)
    net, draws = net.float(), 200
    seen = torch.stack(
        [
            torch.cat([g.flatten() for g in gradients(net, x, pack="int8", group_size=8, seed=i)[0]])
            for i in range(draws)
        ]
    ).double()
    deviation = (seen.var(0) / draws).sqrt()
    reference = torch.cat([g.flatten() for g in exact])
    assert deviation.max() > 1e-6
    assert ((seen.mean(0) - reference).abs() <= 5 * deviation + 1e-5 * reference.abs() + 1e-5).all()


def test_weights_and_their_views_and_copies_are_never_packed():
    net = nn.Linear(32, 32, bias=False)
    net.weight.data[net.weight.abs() < 0.1] = 0.0  # a pruned one would be worth packing
    frozen = nn.Linear(32, 32).requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            h = net(x * 1)
        return F.linear(frozen(h.float()) * 2, net.weight.detach()).sum()

    both = nn.ModuleList([net, frozen])
    for pack in ("exact", "int8"):
        _, counts = packed(forward, weights=both, pack=pack)
        assert counts.report()["left_alone"]["weights"]["tensors"] == 3
        assert "bitmap" not in counts.kinds


def test_layouts_come_back_with_their_strides():
    base = torch.relu(torch.randn(6, 5, 4, 8)).requires_grad_()
    seen = {}

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            seen["x"] = ctx.saved_tensors[0]
            return grad.expand(seen["x"].shape)

    def of(x):
        loss, counts = packed(lambda: Watch.apply(x))
        loss.backward()
        assert counts.kinds == {"bitmap"}
        assert torch.equal(seen["x"], x)
        assert seen["x"].stride() == x.stride()

    for view in (
        base, base.transpose(1, 3), base[1:], base[:, :, 1:3], base[..., ::2], base.permute(3, 1, 0, 2)[:, 1:],
        base.unsqueeze(1), base.flatten(),
    ):  # fmt: skip
        of(view)


def test_what_is_left_alone_still_gives_its_gradients():
    x = torch.relu(torch.randn(40, 40)).requires_grad_()
    sparse = torch.eye(40).to_sparse().requires_grad_()
    cases = {
        "expanded": lambda: (x[:1].expand(40, 40) * x).sum(),
        "complex": lambda: torch.view_as_complex(x.view(40, 20, 2)).square().abs().sum(),
        "negative": lambda: (torch.view_as_complex(x.view(40, 20, 2)).conj().imag ** 2).sum(),
        "empty": lambda: x[:0].exp().sum() + x.sum(),
        "sparse": lambda: torch.sparse.mm(sparse, x).sum(),
        "subclass": lambda: (x.as_subclass(Tagged) * x).sum(),
    }
    for name, forward in cases.items():
        reference = torch.autograd.grad(forward(), x)[0]
        loss, _ = packed(forward)
        assert torch.equal(torch.autograd.grad(loss, x)[0], reference), name


class Tagged(torch.Tensor):
    pass


def test_in_place_changes_are_told_where_the_tensor_itself_is_kept_and_harmless_where_a_copy_is():
    x = torch.randn(64, requires_grad=True)

    def changed(of):
        def forward():
            h = of(x * 1)
            y = h * h
            h.detach().zero_()
            return y.sum()

        return forward

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(torch.exp)().backward()
    loss, _ = packed(changed(torch.exp))
    with pytest.raises(TrainingError, match=r"must not be modified in place after forward saved it"):
        loss.backward()
    loss, counts = packed(changed(torch.relu))
    loss.backward()
    assert counts.kinds == {"bitmap"}
    assert torch.equal(x.grad, 2 * x.detach().clamp(min=0))


def test_a_new_version_of_the_same_memory_is_another_tensor():
    x = torch.randn(64, requires_grad=True)

    def forward():
        h = (x * 1).relu()
        (h * h).sum()  # saved, and its graph is dropped
        with torch.no_grad():
            h.mul_(2.0).clamp_(min=1.0)
        return (h.detach() * x).sum()

    loss, _ = packed(forward)
    loss.backward()
    assert torch.equal(x.grad, (x.detach().relu() * 2).clamp(min=1.0))


def test_packed_memory_is_freed_while_forward_goes_on_and_the_rest_with_the_graph():
    x, held = torch.randn(1000, requires_grad=True), {}

    def forward():
        h = torch.relu(x * 1)
        held["relu"] = StorageWeakRef(h.untyped_storage())
        y = F.dropout(h, 0.5)
        del h
        y = y * 1.0
        held["freed in forward"] = held["relu"].expired()
        kept = torch.exp(y)
        held["exp"] = StorageWeakRef(kept.untyped_storage())
        return kept.sum()

    loss, _ = packed(forward)
    assert held["freed in forward"]
    assert not held["exp"].expired()
    del loss  # by counting references alone: a cycle would keep it until the next collection
    assert held["exp"].expired()


@pytest.mark.parametrize("name", ["max-pool", "residual"])
def test_double_backward(name):
    net, x = NETS[name]()
    x.requires_grad_()

    def second(hooked):
        torch.manual_seed(3)
        loss = packed(lambda: net(x).square().sum(), weights=net)[0] if hooked else net(x).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [p for p in net.parameters() if p.dim() > 1])

    assert all(torch.equal(a, b) for a, b in zip(second(True), second(False), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("pack", ["exact", "int8"])
def test_the_input_of_a_checkpointed_region_is_never_rounded(pack, reentrant):
    inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    outer, x, seen = nn.Linear(32, 32), torch.randn(6, 32), []
    inner[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))

    def forward():
        h = torch.tanh(outer(x))  # tanh saves it as well, rounded
        return outer(checkpoint(inner, h, use_reentrant=reentrant)).sum()

    loss, counts = packed(forward, weights=nn.ModuleList([inner, outer]), pack=pack)
    loss.backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert pack == "exact" or "int8" in counts.kinds


def test_a_relu_whose_region_saved_it_elsewhere_is_not_taken_for_its_own_result():
    layer, inner, x = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
    parameters = list(layer.parameters())

    def forward():
        return layer(checkpoint(inner, x, use_reentrant=False)).square().sum()

    plain = torch.autograd.grad(forward(), parameters)
    loss, counts = packed(forward, weights=nn.ModuleList([layer, inner]))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, parameters), plain, strict=True))
    assert "sign" not in counts.kinds


def test_a_compiled_net():
    net, x = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3)), torch.randn(6, 32)
    compiled = torch.compile(net, backend="aot_eager_decomp_partition")
    plain, _ = gradients(compiled, x, pack=None)
    ours, counts = gradients(compiled, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert "bits" in counts.kinds


class WritesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x.fill_(float("nan"))
        return 2 * grad


def test_what_a_backward_writes_into_its_saved_tensor_reaches_no_other_that_saved_the_same():
    x = torch.randn(256).relu().requires_grad_()
    (a, b), counts = packed(lambda: (x * x, WritesWhatItSaved.apply(x)))
    assert counts.shared
    (gradient,) = torch.autograd.grad((a + b).sum(), x)
    torch.testing.assert_close(gradient, 2 * x.detach() + 2)


# -- what the model holds anyway


def replaced(norm):
    norm.weight = nn.Parameter(torch.ones(4))


def moved(norm):
    norm.weight.data = norm.weight.data.clone()


def loaded(norm):
    norm.load_state_dict({name: value.clone() for name, value in norm.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replaced, moved, loaded])
def test_a_weight_in_other_memory_is_known_once_it_was_saved(change):
    norm = nn.BatchNorm1d(4)
    held = HeldMemory(norm)
    before = norm.weight.data
    change(norm)
    held.start()
    assert norm.weight.view(2, 2) in held
    assert norm.weight.detach() in held
    assert before not in held


def test_buffers_are_looked_up_for_every_forward():
    norm = nn.BatchNorm1d(4)
    held = HeldMemory(norm)
    norm.running_mean = torch.ones(4)
    norm.register_buffer("late", torch.ones(4))
    held.start()
    assert norm.running_mean in held
    assert norm.late[1:] in held


def test_the_address_of_a_weight_that_is_gone_stands_for_no_other_tensor():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 12))

    model = Wide()
    held = HeldMemory(model)
    model.weight = None
    others = [torch.ones(1 << 12) for _ in range(64)]
    assert not any(other in held for other in others)


def test_the_copies_that_autocast_makes_are_weights_and_do_not_send_it_through_the_model(monkeypatch):
    layer = nn.Linear(4, 4)
    held = HeldMemory(layer)
    monkeypatch.setattr(held, "_look", lambda: pytest.fail("looked again"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.weight.to(torch.bfloat16) in held
        assert layer(torch.ones(1, 4)) not in held
