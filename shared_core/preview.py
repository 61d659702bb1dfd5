"""What a technique tells of itself before a run: what it would touch, when it acts, how it runs on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from shared_core.errors import MissingExtraError
from shared_core.module_match import PAST_FORWARD, plain_name

if TYPE_CHECKING:
    from shared_core.technique import Technique

Event = tuple[int | None, str]
"""What happens at which optimizer step (0: before the first; None: after training)."""


@dataclass(frozen=True)
class Touched:
    """What a technique acts on in a model: tensors or modules by name with their number of elements.

    `left_out` tells why others that it could handle stay as they are. Without tensors it acts on the run as a whole.
    """

    tensors: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    what: str = "the run as a whole"

    @classmethod
    def modules(
        cls, modules: Mapping[str, nn.Module], left_out: Mapping[str, str] | None = None, what: str = "layers"
    ) -> Touched:
        """Return modules with the number of elements of all their parameters."""
        sizes = {name: sum(value.numel() for value in module.parameters()) for name, module in modules.items()}
        return cls(sizes, dict(left_out or {}), what)

    @classmethod
    def parameters(
        cls, named: Iterable[tuple[str, Tensor]], left_out: Mapping[str, str] | None = None, what: str = "weights"
    ) -> Touched:
        """Return tensors with their number of elements."""
        return cls({name: value.numel() for name, value in named}, dict(left_out or {}), what)


def trained(model: nn.Module) -> Touched:
    """Return the parameters of a model that have a gradient."""
    named = model.named_parameters()
    return Touched.parameters(((name, value) for name, value in named if value.requires_grad), what="parameters")


def out_of_reach(model: nn.Module, techniques: Mapping[str, Technique]) -> list[str]:
    """Return a line about each kind of weights that techniques of layers pass by, where there are such.

    Matrices in no layer that they know: the experts of a mixture in transformers 5, where they may be most of the
    model, and GPT-2's under `fp8`. And layers whose weights the code of their parents reads.

    Args:
        model: With the techniques attached.
        techniques: By key; those for which the user named modules are taken to mean these alone.
    """
    matrices: dict[str, tuple[str, str, int]] = {}
    for prefix, module in model.named_modules():
        if not any(base.__module__.startswith("torch.nn.") for base in type(module).__mro__ if base is not nn.Module):
            for name, value in module.named_parameters(recurse=False):
                if value.ndim > (1 if name == "weight" else 2) and min(value.shape) > 1:
                    plain = plain_name(prefix).removesuffix(".base_layer")  # peft's, under adapters
                    matrices[f"{plain}.{name}"] = plain, type(module).__name__, value.numel()
    lines = []
    for key, technique in techniques.items():
        touched = technique.touched(model)
        passed = {
            name: (kind, size)
            for name, (module_name, kind, size) in matrices.items()
            if not {name, module_name} & touched.tensors.keys()
        }
        of_layers = touched.what in ("layers", "factorised layers", "weights") and touched.tensors
        if passed and of_layers and not getattr(technique.config, "include", ()):
            share = sum(size for _, size in passed.values()) / sum(value.numel() for value in model.parameters())
            kinds = ", ".join(sorted({kind for kind, _ in passed.values()}))
            lines.append(
                f"{key}: weights left as they are: {len(passed)} of {kinds}, {share:.0%} of the parameters, which are "
                "no layers that it knows"
            )
        past = [reason for reason in touched.left_out.values() if PAST_FORWARD in reason]
        if past:
            lines.append(f"{key}: layers left as they are: {len(past)}: {'; '.join(sorted({*past}))}")
    return lines


def every(steps: int) -> str:
    """Return "every step", or "every 10 steps"."""
    return "every step" if steps == 1 else f"every {steps} steps"


@dataclass(frozen=True)
class Ability:
    """How a technique runs on a device: as the hardware can, by other arithmetic in its place, to no effect, or not."""

    level: Literal["native", "emulated", "inactive", "refused"]
    why: str = ""


def needs(library: str, extra: str, where: str) -> Ability | None:
    """Return that a technique is refused without a library that is not installed; None if it is."""
    return None if find_spec(library) else Ability("refused", str(MissingExtraError(where, library, extra)))
