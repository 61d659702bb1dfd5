"""A language model's output head that can leave its product out and return `DeferredLogits`."""

from __future__ import annotations

import copyreg
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shared_core.distillation.batch import trains
from shared_core.distillation.deferred_logits import DeferredLogits, Made
from shared_core.errors import ConfigError


class DeferringLinear(nn.Linear):
    """`torch.nn.Linear` whose product is left out when `when` says so; copied and pickled ones are stock."""

    when: Literal["never", "training", "always"]
    budget: int | None

    def forward(self, input: Tensor) -> Tensor:
        """Return logits, or what stands for them."""
        if torch.compiler.is_compiling() or self.when == "never" or (self.when == "training" and not trains(self)):
            return super().forward(input)
        kind, dtype = input.device.type, self.weight.dtype
        if torch.is_autocast_enabled(kind) and torch.float64 not in (dtype, input.dtype):
            dtype = torch.get_autocast_dtype(kind)
        made = Made(input, self.weight, self.bias, dtype)
        return DeferredLogits(made, (*input.shape[:-1], self.out_features), dtype, self.budget)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a stock layer: the copy's owner (an average, a saved model) is not distilled."""
        state = {name: value for name, value in vars(self).items() if name not in ("when", "budget")}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


def make_deferring(model: nn.Module, whose: str, budget: int | None) -> DeferringLinear:
    """Return a model's output head, able to defer from now on; parameters and keys stay as they are.

    Args:
        model: Tells its head, or a part of it does, by ``get_output_embeddings()``, as Transformers' models do.
        whose: ``student`` or ``teacher``.
        budget: Bytes of logits that may exist at a time.

    Raises:
        ConfigError: If there is no such head, or it computes more than ``h Wᵀ + b``.
    """
    asked = [part.get_output_embeddings for part in model.modules() if hasattr(part, "get_output_embeddings")]
    heads = {id(head): head for head in (cast("Any", ask)() for ask in asked) if head is not None}
    if len(heads) != 1:
        raise ConfigError(
            f"distill: chunked needs the {whose} to tell one output head by get_output_embeddings(), got {len(heads)} "
            f"from {type(model).__name__}; define that method to return the nn.Linear that makes the logits"
        )
    (head,) = heads.values()
    changed = "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks
    if type(head) is not nn.Linear or changed:
        got = f"{type(head).__name__}{' with a forward or hooks put on it' if changed else ''}"
        raise ConfigError(
            f"distill: chunked needs the {whose}'s output head to be a plain nn.Linear, got {got}; leave the head "
            "out of adapters, quantisation and device maps, or switch chunked off"
        )
    if any(getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
           for part in model.modules()):  # fmt: skip
        raise ConfigError(f"distill: chunked must run in eager mode, got a compiled {whose}; drop torch.compile")
    head.__class__ = DeferringLinear
    deferring = cast("DeferringLinear", head)
    deferring.when, deferring.budget = "never", budget
    return deferring


def make_stock(head: DeferringLinear) -> None:
    """Give a head its own class back."""
    if type(head) is DeferringLinear:
        head.__class__ = nn.Linear  # type: ignore[assignment]
        del head.when, head.budget
