"""Every divergence from its paper's formula in float64, and how tests call them all alike."""

import numpy as np
import torch

from shared_core.distillation.losses.divergences import DIVERGENCES
from shared_core.distillation.losses.regression import teacher_bounded_mse_sum

INF, NAN = float("inf"), float("nan")
SOFT = ["forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"]


def of(name):
    """The sum form with what it needs beyond the signature that all share."""
    if name == "teacher_bounded_mse":
        return lambda student, teacher, **options: teacher_bounded_mse_sum(
            student, teacher, targets=torch.zeros_like(teacher), **options
        )
    return DIVERGENCES[name]


def mean(name, *args, **options):
    total, count = of(name)(*args, **options)
    return total / max(count.item(), 1)


def soft(logits, temperature):
    z = logits / temperature
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(-1)


def gjsd(p, q, beta):
    # Agarwal et al., equation 1: beta KL(P || beta P + (1 - beta) Q) + (1 - beta) KL(Q || the same)
    mixed = beta * p + (1 - beta) * q
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


def sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


def reference(name, student, teacher, temperature):
    """One number a row, T² included, from the papers' formulas in float64."""
    s, t = student.double().numpy(), teacher.double().numpy()
    p, q = soft(t, temperature), soft(s, temperature)
    if name == "forward_kl":
        return temperature**2 * kl(p, q)
    if name == "reverse_kl":
        return temperature**2 * kl(q, p)
    if name == "jsd":
        return temperature**2 * gjsd(p, q, 0.5)
    if name == "soft_cross_entropy":
        return -(temperature**2) * (p * np.log(q)).sum(-1)
    if name == "hard_label":
        return -np.log(np.take_along_axis(soft(s, 1.0), t.argmax(-1)[..., None], -1))[..., 0]
    if name == "logit_mse":
        return ((s - t) ** 2).mean(-1)
    if name == "huber":
        d = np.abs(s - t)
        return np.where(d <= 1, d**2 / 2, d - 0.5).mean(-1)
    if name == "teacher_bounded_mse":
        ours, theirs = (s**2).sum(-1), (t**2).sum(-1)
        return np.where(ours > theirs, ours, 0.0)
    yes, guess = sigmoid(t / temperature), sigmoid(s / temperature)
    no, other = sigmoid(-t / temperature), sigmoid(-s / temperature)
    return temperature**2 * (yes * np.log(yes / guess) + no * np.log(no / other)).sum(-1)
