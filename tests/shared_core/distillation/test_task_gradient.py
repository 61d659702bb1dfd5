"""The soft loss of large logits, whose gradient is computed with it, and heads that are fused into the loss.

The same as autograd's, in less memory; gradients go where they would have gone.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from plain_loop import plain_step
from torch import nn
from transformers import (
    CLIPVisionConfig,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from shared_core import Session
from shared_core.distillation import comparison
from shared_core.distillation import task_gradient as module
from shared_core.distillation.forward_capture import Forward
from shared_core.distillation.losses.divergences import DIVERGENCES
from shared_core.distillation.task_gradient import (
    FusedHead,
    TaskLoss,
    cross_entropy_of,
    fits_fused_sum,
    fused_sum,
    hard_term,
)
from shared_core.errors import ConfigError, TrainingError

FUSED = ("forward_kl", "reverse_kl", "jsd")
KD_ROWS = module.kd_rows_


def pair(dtype=torch.float64, shape=(3, 5, 11)):
    torch.manual_seed(0)
    student, teacher = 3 * torch.randn(shape, dtype=torch.float64), 3 * torch.randn(shape, dtype=torch.float64)
    student[0, 0, 1] = teacher[0, 0, 1] = -math.inf  # a class that both rule out
    return student.to(dtype).requires_grad_(), teacher.to(dtype)


def reference(divergence, student, teacher, temperature, mask, beta):
    """Return sum and gradient from the equations, in float64, with a finite logit for what is ruled out."""
    student, teacher = (side.detach().double().clamp_min(-1e6) for side in (student, teacher))
    student.requires_grad_()
    log_s, log_t = F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log(1 - beta))

    def kl(log_p, log_q):
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    rows = {
        "forward_kl": lambda: kl(log_t, log_s),
        "reverse_kl": lambda: kl(log_s, log_t),
        "jsd": lambda: beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m),
    }[divergence]()
    total = temperature**2 * rows[mask].sum()
    (gradient,) = torch.autograd.grad(total, student)
    return total.detach(), gradient


@pytest.mark.parametrize("divergence", FUSED)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize("temperature", [0.5, 2.0, 40.0])
@pytest.mark.parametrize("masked", [True, False])
def test_it_is_the_equation(divergence, dtype, tolerance, temperature, masked):
    student, teacher = pair(dtype)
    mask = torch.rand(3, 5) > 0.4 if masked else torch.ones(3, 5, dtype=torch.bool)
    total, gradient = reference(divergence, student, teacher, temperature, mask, 0.3)
    found, count = fused_sum(
        divergence, student, teacher, temperature=temperature, mask=mask if masked else None, beta=0.3
    )
    found.backward()
    assert count == mask.sum()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.item() == pytest.approx(total.item(), rel=tolerance)
    assert student.grad.dtype == dtype
    scale = gradient.abs().max()
    assert (student.grad.double() - gradient).abs().max() <= tolerance * scale
    assert not student.grad[~mask].any()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_of_jsd(beta):
    student, teacher = pair()
    expected, _ = DIVERGENCES["jsd"](student, teacher, beta=beta)
    assert torch.allclose(fused_sum("jsd", student, teacher, beta=beta)[0], expected, rtol=1e-12)


def test_no_row_that_counts():
    student, teacher = pair(torch.float32)
    total, count = fused_sum("forward_kl", student, teacher, mask=torch.zeros(3, 5, dtype=torch.bool))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert not student.grad.any()


def test_rows_that_do_not_count_are_not_read():
    student, teacher = pair(torch.float32)
    mask = torch.arange(15).view(3, 5) % 2 == 0
    with torch.no_grad():
        student[~mask] = math.nan
    total, _ = fused_sum("forward_kl", student, teacher, mask=mask)
    total.backward()
    assert total.isfinite()
    assert student.grad.isfinite().all()


def test_float16_keeps_what_the_scale_of_a_loss_is_to_save():
    student = torch.zeros(1, 60_000, dtype=torch.float16, requires_grad=True)
    teacher = torch.zeros(1, 60_000)
    teacher[0, 0] = 1e-3
    total, _ = fused_sum("forward_kl", student, teacher, temperature=1.0)
    (total * 2.0**20).backward()
    assert (student.grad != 0).float().mean() > 0.99  # unscaled they are below 2^-24


def test_a_second_backward_needs_the_graph():
    student, teacher = pair(torch.float32)
    total, _ = fused_sum("forward_kl", student, teacher)
    total.backward(retain_graph=True)
    first = student.grad.clone()
    total.backward()
    assert torch.equal(student.grad, 2 * first)
    with pytest.raises(TrainingError, match="backward must run only once"):
        total.backward()


def test_a_second_derivative_is_refused():
    student, teacher = pair(torch.float32)
    total, _ = fused_sum("forward_kl", student, teacher)
    with pytest.raises(TrainingError, match="create_graph"):
        total.backward(create_graph=True)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("temperature", math.nan), ("beta", 1.5)])
def test_odd_options_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        fused_sum("jsd", *pair(), **{name: value})


def test_what_it_is_not_for():
    logits = torch.zeros(module.SMALLEST, 1, requires_grad=True)
    assert fits_fused_sum("forward_kl", logits, logits)
    assert not fits_fused_sum("forward_kl", logits[1:], logits)
    assert not fits_fused_sum("logit_mse", logits, logits)
    assert not fits_fused_sum("forward_kl", logits.detach(), logits)
    with torch.no_grad():
        assert not fits_fused_sum("forward_kl", logits, logits)


class Classifier(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})


def trained(options):
    model, x = Classifier(0), torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
    session = Session({"distill": {"teacher": Classifier(1), **options}})
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    session.begin([optimizer], total_steps=5)
    for step in range(5):
        plain_step(session, optimizer, model(x, labels=(torch.arange(16) + step) % 9)["loss"])
    return model.state_dict()


@pytest.mark.parametrize("divergence", FUSED)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"vocab_size": 7},
        {"temperature_end": 1.0},
        {"scale_by_temperature": False},
        {"teacher": [Classifier(1), Classifier(2)]},
        {"teacher": "mutual", "peers": 2},
    ],
)
def test_a_run_takes_the_same_steps(divergence, more, monkeypatch):
    options = {"divergence": divergence, **more}
    expected = trained(options)
    calls = []
    monkeypatch.setattr(module, "SMALLEST", 1)
    for name, kernel in (("kd_rows", module.kd_rows), ("kd_rows_", KD_ROWS)):
        monkeypatch.setattr(module, name, lambda *args, kernel=kernel: calls.append(1) or kernel(*args))
    terms = []
    monkeypatch.setattr(comparison, "hard_term", lambda *args: terms.append(hard_term(*args)) or terms[-1])
    found = trained(options)
    # cut classes have a cross-entropy, and peers train each other
    assert [term is not None for term in terms] == [True] * (0 if {"vocab_size", "peers"} & more.keys() else 5)
    assert len(calls) == (10 if "peers" in more else 5)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-5), name


def task_losses(logits, labels):
    """Return task losses by name, and whether one pass computes their gradient with that of the soft term."""
    flat, target = logits.view(-1, logits.shape[-1]), labels.flatten()
    mean = F.cross_entropy(flat, target)
    return {
        "mean": (mean, True),
        "sum": (F.cross_entropy(flat.float(), target, reduction="sum") / torch.tensor(7), True),
        "scaled": (3 * mean * 0.5, True),
        "ignored": (F.cross_entropy(flat, target.masked_fill(target == 2, -100)), True),
        "smoothed": (F.cross_entropy(flat, target, label_smoothing=0.1), False),
        "class weights": (F.cross_entropy(flat, target, weight=torch.arange(1.0, 12.0).to(flat.dtype)), False),
        "other term": (mean + logits.square().mean(), False),
        "half of the rows": (F.cross_entropy(flat[::2], target[::2]), False),
        "moved rows": (F.cross_entropy(logits.transpose(0, 1).reshape(-1, 11), labels.t().flatten()), False),
        "over rows": (F.nll_loss(F.log_softmax(flat, 0), target), False),
        "sigmoid": (F.binary_cross_entropy_with_logits(flat, flat.detach().sigmoid()), False),
        "nothing labeled": (F.cross_entropy(flat, torch.full_like(target, -100), reduction="sum"), True),
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_for_both_terms(masked, dtype, monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 1)
    torch.manual_seed(0)
    hidden, teacher, labels = torch.randn(4, 5, 6), nn.Linear(6, 11), torch.randint(11, (4, 5))
    weight = nn.Linear(6, 11).to(dtype).weight.detach()
    mask = torch.arange(20).view(4, 5) % 4 != 0 if masked else None
    seen = labels.masked_fill(~mask, -100) if masked else labels
    for name in task_losses(torch.zeros(4, 5, 11), seen.clone()):
        found = []
        for joined in (True, False):
            parameter = weight.clone().requires_grad_()
            logits = F.linear(hidden.to(dtype), parameter)
            loss, one_pass = task_losses(logits, seen.clone())[name]
            task = TaskLoss(loss, lambda weight, count: 0.3 * weight / (0.7 / count)) if joined else None
            hard = hard_term(task, cross_entropy_of(task.loss, logits), mask) if joined else None
            assert (hard is not None) == (joined and one_pass), name
            total, count = fused_sum("forward_kl", logits, teacher(hidden), mask=mask, hard=hard)
            (0.7 * total / count + (0.0 if hard else 0.3 * loss)).backward()
            found.append(parameter.grad)
        near = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 2e-3}  # rounded twice
        torch.testing.assert_close(*found, **near, msg=lambda text, name=name: f"{name}: {text}")


def test_a_row_with_a_label_alone_is_not_left_out():
    logits = torch.randn(4, 5, 11, requires_grad=True) * 1
    task = TaskLoss(F.cross_entropy(logits.view(-1, 11), torch.zeros(20, dtype=torch.int64)), lambda weight, _: weight)
    assert hard_term(task, cross_entropy_of(task.loss, logits), torch.ones(4, 5, dtype=torch.bool)) is not None
    assert hard_term(task, cross_entropy_of(task.loss, logits), torch.arange(20).view(4, 5) > 0) is None


TEXT = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 8, "patch_size": 4, "projection_dim": 16}  # fmt: skip
SCANS = {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**TEXT, logits_scaling=8.0)),
    "multiplied": lambda: FalconH1ForCausalLM(FalconH1Config(**TEXT, **SCANS, lm_head_multiplier=0.3)),
    "with images": lambda: LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_id=23)
    ),
}


def fused(kind="plain"):
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = MODELS[kind]().train()
    ids = torch.randint(0, 20, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "fused_lm_head": True}
    logits = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits
    add_fused_lm_head(model)
    return model, inputs, logits


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_the_models_own_forward(kind):
    model, inputs, logits = fused(kind)
    head = FusedHead(model)
    head.active = True
    found = head.with_logits(Forward((), inputs, model(**inputs))).output.logits
    assert torch.equal(found, logits)
    assert found.requires_grad


def test_every_forward_of_a_loss_keeps_its_gradient():
    def gradients(head):
        model.zero_grad()
        loss = sum(factor * model(**inputs).log_probs.square().sum() for factor in (1.0, 2.0))
        (loss if head is None else head.take(loss).rejoined()).backward()
        return [weight.grad.clone() for weight in model.parameters()]

    model, inputs, _ = fused()
    expected, head = gradients(None), FusedHead(model)
    head.active = True
    assert all(map(torch.equal, gradients(head), expected))
    head.detach()
    assert not model._forward_hooks
    assert not model(**inputs).log_probs.is_leaf


def test_evaluation_and_copies_keep_their_graph():
    model, inputs, _ = fused()
    head = FusedHead(model)
    head.active = True
    assert not model.eval()(**inputs).log_probs.is_leaf
    assert not copy.deepcopy(model).train()(**inputs).log_probs.is_leaf
    assert model.train()(**inputs).log_probs.is_leaf
