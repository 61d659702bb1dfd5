"""Attack a classifier with inputs that were changed to mislead it: FGSM, PGD, and accuracy under them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.modules.calls import evaluating
from shared_core.quantization.integer.convert import ON_INTEGERS
from shared_core.quantization.layer_graph import output_tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits and targets → the loss summed over the examples, a scalar."""
Bound = float | Tensor
"""A number, or a tensor that broadcasts to the inputs, such as one value a channel."""


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float() if logits.element_size() < 4 else logits, y, reduction="sum")


def fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: Bound,
    *,
    low: Bound | None = None,
    high: Bound | None = None,
    loss: Loss = _cross_entropy,
) -> Tensor:
    """Return inputs moved by one step of size `eps` against their targets: ``clamp(x + eps·sign ∇ₓL, low, high)``.

    The gradient passes fake quantisation straight through. The model is in evaluation mode meanwhile; its modes and
    the gradients of its parameters are as before afterwards.

    Args:
        model: Returns logits (examples, classes), or an output with ``logits``.
        x: Floating point, examples first; the model's first argument.
        y: Targets, (examples,) class indices for the default loss.
        eps: Largest change of an element, at least 0, in units of `x`.
        low: Smallest value that an input may have; None: no bound.
        high: Largest.
        loss: What is made larger; by default cross-entropy.

    Raises:
        ConfigError: If an option breaks its rule, or `x` lies outside of `low` and `high`.
        CompatibilityError: If the model has no gradient for its input, as integer models have none.
        TrainingError: If the gradient is not finite.

    Source: Goodfellow, Shlens, Szegedy 2014, arXiv:1412.6572, section 4.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        >>> fgsm(net, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0.125)
        tensor([[0.3750, 0.6250]])
    """
    where = "fgsm"
    _check(where, x, y, low, high, eps=eps)
    with _attacking(model):
        return _projected(x + eps * _ascent(where, model, x, y, loss), x, eps, low, high)


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: Bound,
    step: Bound,
    steps: int,
    *,
    low: Bound | None = None,
    high: Bound | None = None,
    random_start: bool = True,
    generator: torch.Generator | None = None,
    loss: Loss = _cross_entropy,
) -> Tensor:
    """Return inputs after `steps` of ``x ← Π(x + step·sign ∇ₓL)``, Π the projection to ``|δ| <= eps`` and the range.

    Args:
        model: As in `fgsm`.
        x: As in `fgsm`.
        y: As in `fgsm`.
        eps: Largest change of an element, at least 0, in units of `x`.
        step: Of each step, above 0; ``2.5·eps/steps`` lets every point of the ball be reached.
        steps: How many, at least 1.
        low: As in `fgsm`.
        high: As in `fgsm`.
        random_start: Start from a uniform point of the ball rather than from `x`.
        generator: Of that point; None: a new one of seed 0. The global generator is not touched.
        loss: As in `fgsm`.

    Raises:
        ConfigError: As in `fgsm`.
        CompatibilityError: As in `fgsm`.
        TrainingError: As in `fgsm`.

    Source: Madry et al. 2017, arXiv:1706.06083, section 2.1.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        >>> pgd(net, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0.125, 0.0625, 10)
        tensor([[0.3750, 0.6250]])
    """
    where = "pgd"
    _check(where, x, y, low, high, eps=eps)
    _check_bound(where, "step", step, "above 0", lambda value: value > 0)
    steps = checked(steps, int, where, "steps", low=1)
    with _attacking(model):
        moved = x.detach().clone()
        if random_start:
            generator = generator if generator is not None else torch.Generator().manual_seed(0)
            # drawn in float32 on the generator's device: the same start whatever the device and type of x
            draw = torch.rand(x.shape, generator=generator, device=generator.device).mul_(2).sub_(1)
            moved = _projected(x + eps * draw.to(x), x, eps, low, high)
        for _ in range(steps):
            moved = _projected(moved + step * _ascent(where, model, moved, y, loss), x, eps, low, high)
        return moved


@dataclass(frozen=True)
class AdversarialAccuracy:
    """The result of `adversarial_accuracy`.

    Attributes:
        examples: How many.
        clean: Share of the unchanged inputs that are classified right.
        adversarial: Share classified right both unchanged and attacked.
        transferred: Whether the attack was made on another model.
        without_gradient: Examples whose gradient was zero: the attack left them where they were, which is no strength.
    """

    examples: int
    clean: float
    adversarial: float
    transferred: bool
    without_gradient: int


def adversarial_accuracy(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    eps: Bound,
    *,
    attack: Literal["fgsm", "pgd"] = "pgd",
    step: Bound | None = None,
    steps: int = 20,
    low: Bound | None = None,
    high: Bound | None = None,
    source: nn.Module | None = None,
    seed: int = 0,
) -> AdversarialAccuracy:
    """Return a classifier's accuracy before and under an attack.

    An example that is wrong unchanged counts as wrong under attack, since no change is one the attack may make.

    Args:
        model: As in `fgsm`.
        batches: (inputs, class indices) each.
        eps: As in `fgsm`.
        attack: Which.
        step: Of PGD; None: ``2.5·eps/steps``.
        steps: Of PGD.
        low: As in `fgsm`.
        high: As in `fgsm`.
        source: The model on which the attack is made, such as the float model of an integer one, which has no
            gradient; None: `model` itself.
        seed: Of PGD's random starts.

    Raises:
        ConfigError: As in `fgsm`, or if there are no examples.
        CompatibilityError: If the attacked model has no gradient for its input, or one of zero for all examples.
        TrainingError: As in `fgsm`.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]])), net.bias.data.zero_()
        >>> batches = [(torch.tensor([[0.5, 0.4], [0.9, 0.1]]), torch.tensor([0, 0]))]
        >>> found = adversarial_accuracy(net, batches, 0.125, attack="fgsm")
        >>> found.clean, found.adversarial
        (1.0, 0.5)
    """
    where = "adversarial_accuracy"
    checked(attack, Literal["fgsm", "pgd"], where, "attack")
    attacked = model if source is None else source
    generator = torch.Generator().manual_seed(seed)
    examples = clean = held = without_gradient = 0
    for x, y in batches:
        _check(where, x, y, low, high, eps=eps)
        if not len(x):
            continue
        if attack == "fgsm" or not torch.as_tensor(eps).any():
            moved = fgsm(attacked, x, y, eps, low=low, high=high)
        else:
            # 2.5 eps / steps (Madry et al. 2018, arXiv:1706.06083): the boundary is within reach from any start.
            size = 2.5 * eps / steps if step is None else step
            moved = pgd(attacked, x, y, eps, size, steps, low=low, high=high, generator=generator)
        right = _right(model, x, y)
        examples, clean = examples + len(x), clean + int(right.sum())
        held += int((right & _right(model, moved, y)).sum())
        with _attacking(attacked):
            # An input without any gradient cannot be attacked: counted, for robustness would be an illusion (Athalye
            # et al. 2018, arXiv:1802.00420).
            still = _ascent(where, attacked, x, y, _cross_entropy).flatten(1).any(1).logical_not()
        without_gradient += int(still.sum())
    if not examples:
        raise ConfigError(where, "batches must hold at least one example, got none")
    if without_gradient == examples:
        _refuse_gradient(where, f"that is zero for all {examples} examples")
    return AdversarialAccuracy(examples, clean / examples, held / examples, source is not None, without_gradient)


def _ascent(where: str, model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Return the sign of the loss's gradient by `x`."""
    if not len(x):
        return torch.zeros_like(x)
    leaf = x.detach().clone().requires_grad_()
    value = loss(output_tensor(model(leaf)), y.clone())  # a clone: autograd cannot keep an inference tensor
    if value.numel() != 1:
        raise ConfigError(where, f"loss must return a scalar, got shape {tuple(value.shape)}")
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.reshape(()), leaf, allow_unused=True)
    if gradient is None:
        _refuse_gradient(where, "its output does not depend on it differentiably")
    if not bool(torch.isfinite(gradient).all()):
        raise TrainingError(where, "gradient must be finite, got NaN or infinity", "look for NaN in weights or inputs")
    return gradient.sign()


def _refuse_gradient(where: str, why: str) -> NoReturn:
    raise CompatibilityError(
        where,
        f"the model must have a gradient for its input, but {why}",
        "make the attack on its float model (source=)",
    )


@contextlib.contextmanager
def _attacking(model: nn.Module) -> Iterator[None]:
    for name, module in model.named_modules():
        if isinstance(module, ON_INTEGERS):  # its rounding would pass on zeros, which look like strength
            _refuse_gradient("attack", f"{name or 'the model'!r} computes on integers")
    # cuDNN's recurrent layers have no backward in evaluation mode
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn: Any = torch.backends.cudnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), cudnn:
        yield


@torch.no_grad()
def _projected(moved: Tensor, x: Tensor, eps: Bound, low: Bound | None, high: Bound | None) -> Tensor:
    # a bound may be a rounding beside the x that lies on it: x itself is always allowed
    least = x - eps if low is None else torch.maximum(x - eps, torch.minimum(_like(low, x), x))
    most = x + eps if high is None else torch.minimum(x + eps, torch.maximum(_like(high, x), x))
    return torch.minimum(torch.maximum(moved, least), most).to(x.dtype)


def _like(bound: Bound, x: Tensor) -> Tensor:
    return torch.as_tensor(bound, dtype=x.dtype, device=x.device)


@torch.no_grad()
def _right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with evaluating(model):
        logits = output_tensor(model(x))
    if logits.dim() != 2:
        raise ConfigError(
            "adversarial_accuracy", f"logits must be of shape (examples, classes), got {tuple(logits.shape)}"
        )
    return logits.argmax(1) == y


def _check(where: str, x: Tensor, y: Tensor, low: Bound | None, high: Bound | None, *, eps: Bound) -> None:
    tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    if not tensors or x.dim() == 0 or len(x) != len(y):
        got = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in (x, y)]
        raise ConfigError(where, f"x and y must be tensors with as many examples, got {got[0]} and {got[1]}")
    if not x.is_floating_point() or not bool(torch.isfinite(x).all()):
        raise ConfigError(where, f"x must be floating point and finite, got {x.dtype} or a value that is not finite")
    _check_bound(where, "eps", eps, "at least 0", lambda value: value >= 0)
    least = -math.inf if low is None else _like(low, x)
    most = math.inf if high is None else _like(high, x)
    # An image that was normalised in float32 may lie a rounding outside of its own bounds.
    slack = 4 * torch.finfo(x.dtype).eps * (1 + x.abs())
    if not bool(((x >= least - slack) & (x <= most + slack)).all()):
        raise ConfigError(
            where,
            f"x must lie between low and high, got {x.min().item():.4g} to {x.max().item():.4g}",
            "give the range that the model's own inputs have (normalised ones have other bounds, one a channel)",
        )


def _check_bound(where: str, name: str, value: Bound, words: str, rule: Callable[[Tensor], Tensor]) -> None:
    values = torch.as_tensor(value, dtype=torch.float64)
    if not bool((rule(values) & torch.isfinite(values)).all()):
        raise ConfigError(where, f"{name} must be {words} and finite, got {value}")
