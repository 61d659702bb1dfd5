"""What a technique touches, what it will do in a run, and what the model still lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

Event = tuple[int | None, str]
"""An event once that many optimizer steps are applied (0: before the first; None: after training)."""


@dataclass(frozen=True)
class Touched:
    """The part of a model that a technique acts on: tensors or modules by name with their number of elements.

    `left_out` tells why others that it could handle stay as they are; those of them in `reached` it works on in another
    way, and those in `asked` the user's options name. Without tensors it acts on the run as a whole. If `what` is
    "weights", "layers" or "factorised layers", less than half of the model's multiplying weights is refused
    (`coverage`); any other word is not measured so.
    """

    tensors: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    what: str = "the run as a whole"
    reached: Iterable[str] = ()
    asked: Iterable[str] = ()

    @classmethod
    def modules(
        cls, modules: Mapping[str, nn.Module], left_out: Mapping[str, str] | None = None, what: str = "layers"
    ) -> Touched:
        """Return modules with the number of elements of all their parameters."""
        sizes = {name: sum(value.numel() for value in module.parameters()) for name, module in modules.items()}
        return cls(sizes, dict(left_out or {}), what)

    @classmethod
    def parameters(
        cls,
        named: Iterable[tuple[str, Tensor]],
        left_out: Mapping[str, str] | None = None,
        what: str = "weights",
        asked: Iterable[str] = (),
    ) -> Touched:
        """Return tensors with their number of elements."""
        return cls({name: value.numel() for name, value in named}, dict(left_out or {}), what, asked=asked)


@dataclass(frozen=True)
class Plan:
    """What a technique will do in this run, and what of it the model does not hold yet; asked again at each use."""

    events: Sequence[Event] = ((0, "on, in every step"),)
    """What happens when, positions resolved and checked."""
    missing: str | Callable[[], str] = ""
    """What the model lacks of that which was asked for, and when it will have it; empty if nothing. Such a model is no
    candidate for the best of a run, and a run that ends with it says so. A function where to count takes time: plans
    are asked for other things more often."""
    usable_from: int = 0
    """Checkpoints from before this step are no ingredients of a soup: their weights are not yet as asked for."""
    guards: Mapping[str, nn.Module | Tensor] = field(default_factory=dict)
    """By name the very objects of the model that this technique found and goes on to work on: if one is replaced, the
    run ends. Looked up again they would always match."""
    keeps_frozen: bool = False
    """True if tensors among `guards` must not train: if somebody unfreezes one, the run ends."""
    acts_on_gradients: bool = False
    """True if `before_step` must come before weights move: then no optimizer may step inside backward."""
    looks_at_batches: bool = False
    """True if training batches are looked at when a technique has replaced the weights."""


def trained(model: nn.Module) -> Touched:
    """Return the parameters of a model that have a gradient."""
    named = model.named_parameters()
    return Touched.parameters(((name, value) for name, value in named if value.requires_grad), what="parameters")


def every(steps: int) -> str:
    """Return "every step", or "every 10 steps"."""
    return "every step" if steps == 1 else f"every {steps} steps"
