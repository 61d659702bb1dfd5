"""Attack a classifier with adversarial inputs (FGSM, PGD), and measure its accuracy under attack."""

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
"""A number, or a tensor that broadcasts to the inputs, such as one value per channel."""


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
    """Return inputs after one step of size `eps` against their targets: ``clamp(x + eps·sign ∇ₓL, low, high)``.

    The gradient passes straight through fake quantization. The model runs in evaluation mode. Afterwards its modes and
    gradients are restored.

    Args:
        model: Returns logits (examples, classes), or an output with ``logits``.
        x: The model's first argument: floating point, examples along axis 0.
        y: Targets, (examples,) class indices for the default loss.
        eps: Largest change of an element, at least 0, in units of `x`.
        low: Smallest allowed input value; None: no bound.
        high: Largest allowed input value; None: no bound.
        loss: The loss to increase; by default cross-entropy.

    Raises:
        ConfigError: If an option is invalid, or `x` lies outside `low` and `high`.
        CompatibilityError: If the model has no gradient for its input, such as an integer model.
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
        step: Step size, above 0. With ``2.5·eps/steps`` every point of the ball can be reached.
        steps: Number of steps, at least 1.
        low: As in `fgsm`.
        high: As in `fgsm`.
        random_start: Start from a uniform point of the ball rather than from `x`.
        generator: Draws that point; None: a new one with seed 0. The global generator is not used.
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
            # Draw in float32 on the generator's device, so that the start does not depend on x's device and type.
            draw = torch.rand(x.shape, generator=generator, device=generator.device).mul_(2).sub_(1)
            moved = _projected(x + eps * draw.to(x), x, eps, low, high)
        for _ in range(steps):
            moved = _projected(moved + step * _ascent(where, model, moved, y, loss), x, eps, low, high)
        return moved


@dataclass(frozen=True)
class AdversarialAccuracy:
    """The result of `adversarial_accuracy`.

    Attributes:
        examples: Number of examples.
        clean: Share of unchanged inputs that are classified correctly.
        adversarial: Share classified correctly both unchanged and attacked.
        transferred: True if the attack was computed on another model.
        without_gradient: Examples with zero gradient. The attack could not change them, which is no robustness.
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

    An example that is misclassified unchanged counts as misclassified under attack, which may leave inputs unchanged.

    Args:
        model: As in `fgsm`.
        batches: Pairs (inputs, class indices).
        eps: As in `fgsm`.
        attack: The attack.
        step: Step size of PGD; None: ``2.5·eps/steps``.
        steps: Steps of PGD.
        low: As in `fgsm`.
        high: As in `fgsm`.
        source: The model on which the attack is computed, such as the float version of an integer model; None: `model`.
        seed: Seed of PGD's random starts.

    Raises:
        ConfigError: As in `fgsm`, or if there are no examples.
        CompatibilityError: If the attacked model has no gradient for its input, or it is zero for all examples.
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
            # 2.5 eps / steps (Madry et al. 2018, arXiv:1706.06083): any start can reach the boundary.
            size = 2.5 * eps / steps if step is None else step
            moved = pgd(attacked, x, y, eps, size, steps, low=low, high=high, generator=generator)
        right = _right(model, x, y)
        examples, clean = examples + len(x), clean + int(right.sum())
        held += int((right & _right(model, moved, y)).sum())
        with _attacking(attacked):
            # An input without gradient cannot be attacked. It is counted, because its robustness is an illusion
            # (Athalye et al. 2018, arXiv:1802.00420).
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
        _refuse_gradient(where, "its output is not differentiable in the input")
    if not bool(torch.isfinite(gradient).all()):
        raise TrainingError(where, "gradient must be finite, got NaN or infinity", "check weights and inputs for NaN")
    return gradient.sign()


def _refuse_gradient(where: str, why: str) -> NoReturn:
    raise CompatibilityError(
        where,
        f"the model has no usable gradient for its input: {why}",
        "attack its float model with source=",
    )


@contextlib.contextmanager
def _attacking(model: nn.Module) -> Iterator[None]:
    for name, module in model.named_modules():
        if isinstance(module, ON_INTEGERS):  # rounding has zero gradients, which look like robustness
            _refuse_gradient("attack", f"{name or 'the model'!r} computes on integers")
    # cuDNN's recurrent layers have no backward in evaluation mode
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn: Any = torch.backends.cudnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), cudnn:
        yield


@torch.no_grad()
def _projected(moved: Tensor, x: Tensor, eps: Bound, low: Bound | None, high: Bound | None) -> Tensor:
    # Rounding may put a bound next to an x that lies on it. x itself is always allowed.
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
        raise ConfigError(where, f"x and y must be tensors with equally many examples, got {got[0]} and {got[1]}")
    if not x.is_floating_point() or not bool(torch.isfinite(x).all()):
        raise ConfigError(where, f"x must be floating point and finite, got {x.dtype} or a non-finite value")
    _check_bound(where, "eps", eps, "at least 0", lambda value: value >= 0)
    least = -math.inf if low is None else _like(low, x)
    most = math.inf if high is None else _like(high, x)
    # Float32 rounding may put a normalized image slightly outside its bounds.
    slack = 4 * torch.finfo(x.dtype).eps * (1 + x.abs())
    if not bool(((x >= least - slack) & (x <= most + slack)).all()):
        raise ConfigError(
            where,
            f"x must lie between low and high, got {x.min().item():.4g} to {x.max().item():.4g}",
            "pass the bounds of the model's inputs (if these are normalized, other bounds, one per channel)",
        )


def _check_bound(where: str, name: str, value: Bound, words: str, rule: Callable[[Tensor], Tensor]) -> None:
    values = torch.as_tensor(value, dtype=torch.float64)
    if not bool((rule(values) & torch.isfinite(values)).all()):
        raise ConfigError(where, f"{name} must be {words} and finite, got {value}")
