"""`Touched`: what a technique acts on. `Plan`: what it will do in this run, and what the model still lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor, nn

Event = tuple[int | None, str]
"""The number of optimizer steps after which something happens (0: before the first, None: after training), and what."""


@dataclass(frozen=True)
class Touched:
    """The part of a model that a technique acts on: names of tensors or modules, with their number of elements.

    Attributes:
        tensors: Name → number of elements. Empty if the technique acts on the run as a whole.
        left_out: Name → why a tensor or module that the technique could handle stays as it is.
        what: What the names are. For "weights", "layers" and "factorized layers", reaching less than half of the
            model's multiplying weights is refused (`coverage`).
        handled_otherwise: Those in `left_out` that the technique handles in another way, such as training them whole.
        asked: Those in `left_out` that the user's options name.
    """

    tensors: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    what: str = "the run as a whole"
    handled_otherwise: Iterable[str] = ()
    asked: Iterable[str] = ()

    @classmethod
    def modules(
        cls, modules: Mapping[str, nn.Module], left_out: Mapping[str, str] | None = None, what: str = "layers"
    ) -> Touched:
        """Return modules with the number of elements of their parameters."""
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
    """What a technique will do in this run, and what the model still lacks. Asked for again at each use."""

    events: Sequence[Event] = ((0, "on, in every step"),)
    """What happens when, with resolved and checked positions."""
    _: KW_ONLY
    missing: str | Callable[[], str] = ""
    """What the model still lacks, and when it will have it. Empty if nothing. Until then the model cannot be the best
    of a run, and a run that ends with it says so. Pass a function if counting takes time."""
    usable_from: int = 0
    """The first step whose checkpoints may go into a soup. Earlier weights are not yet as asked for."""
    guards: Mapping[str, nn.Module | Tensor] = field(default_factory=dict)
    """The objects of the model that this technique keeps working on, by name. If one is replaced, the run ends. The
    objects themselves are needed, because a second lookup by name would always match."""
    keeps_frozen: bool = False
    """True if tensors among `guards` must stay frozen. If one is unfrozen, the run ends."""
    acts_on_gradients: bool = True
    """True if `before_step`, where a technique overrides it, must run before weights change. Then no optimizer may step
    inside backward."""
    looks_at_batches: bool = False
    """True if the technique looks at training batches after another technique replaced the weights."""


def trained(model: nn.Module) -> Touched:
    """Return the parameters of a model that require gradients."""
    named = model.named_parameters()
    return Touched.parameters(((name, value) for name, value in named if value.requires_grad), what="parameters")


def every(steps: int) -> str:
    """Return "every step", or "every 10 steps"."""
    return "every step" if steps == 1 else f"every {steps} steps"
