"""Problems for the chunked distillation loss, and the same losses of whole logits."""

import torch
import torch.nn.functional as F

from shared_core.distillation.chunked_loss import chunked_kd_loss


def problem(rows=(3, 7), classes=29, widths=(5, 9), dtype=torch.float64, bias=False, seed=0):
    """Hidden states, weights, biases of a student and of a teacher."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return tuple((values(*rows, width), values(classes, width), values(classes) if bias else None) for width in widths)


def whole(student, teacher, *, temperature=2.0, labels=None, alpha=0.0, kind="forward_kl", beta=0.5, softcap=None):
    """Hinton's loss with Agarwal's divergences (arXiv:2306.13649, equation 1), of all logits at once."""

    def logits(hidden, weight, bias):
        z = hidden @ weight.t() + (0 if bias is None else bias)
        return (z if softcap is None else softcap * torch.tanh(z / softcap)).flatten(0, -2)

    s, t = logits(*student), logits(*teacher).detach()
    counts = torch.ones(len(s), dtype=torch.bool) if labels is None else labels.flatten() != -100
    p, q = F.softmax(t[counts] / temperature, -1), F.softmax(s[counts] / temperature, -1)

    def kl(of, to):
        return (of * (of / to).log()).sum(-1).mean()

    m = beta * p + (1 - beta) * q
    soft = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]
    loss = (1 - alpha) * temperature**2 * soft
    return loss + alpha * F.cross_entropy(s, labels.flatten()) if alpha else loss


def leaves(side):
    return tuple(None if value is None else value.clone().requires_grad_() for value in side)


def chunked(student, teacher, **options):
    return chunked_kd_loss(student[0], student[1:], teacher[0], teacher[1:], **options)


def assert_same_gradients(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        if b is not None:
            torch.testing.assert_close(a.grad, b.grad, **tolerance)
