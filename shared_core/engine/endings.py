"""Final weights are counted again, wherever they turn up, and compared with what the receipt says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import is_sharded, whole
from shared_core.engine.claims import Claim, Gone, Same, Where
from shared_core.errors import ReceiptError
from shared_core.modules.matching import plain_name

Claims = Mapping[str, Mapping[str, Claim]]
"""Technique → name in the model's state dict → what is said of that tensor."""

_TOLD = 5


def differences(
    claims: Claims,
    weights: Mapping[str, Tensor],
    where: Where = Where.END,
    *,
    lacking: bool = True,
    gather: bool = True,
) -> list[str]:
    """Return how weights differ from what is said of them, a line each; a tensor at a time is looked at.

    Args:
        claims: What is said.
        weights: Under the names of the model's state dict; values may be read only when asked for.
        where: What the weights are of.
        lacking: Whether a tensor that is not there is a difference: a file may leave some out.
        gather: Whether sharded tensors are gathered, for which every process must call; else they are left out.

    Example:
        >>> import torch
        >>> from shared_core.engine.claims import FewValues
        >>> differences({"cluster": {"w": FewValues(1, 1)}}, {"w": torch.tensor([1.0, 2.0])})
        ['cluster: w: 2 distinct values beside 0, at most 1 were asked for']
    """
    there, lines = {plain_name(name): name for name in weights}, []
    for name in dict.fromkeys(name for said in claims.values() for name in said):
        said = [(key, said[name]) for key, said in claims.items() if name in said and said[name].holds >= where]
        if not said or name not in there:
            lines += [f"{key}: {name} is not there" for key, one in said if lacking and not isinstance(one, Gone)]
            continue
        tensor = weights[there[name]].detach()
        if not is_sharded(tensor) or gather:
            # One tensor at a time: sharded ones are gathered whole.
            tensor = whole(tensor)
            lines += [f"{key}: {name}: {wrong}" for key, one in said if (wrong := one.wrong(tensor, where))]
    return lines


def settled(claims: Claims, model: nn.Module) -> Claims:
    """Return claims with what tensors are now where it is said that they stay so.

    Those of tensors that were merged into others when techniques were detached are left out. Sharded tensors are
    gathered one by one; then every process must call it.

    Args:
        claims: What techniques said when they had finished.
        model: As training leaves it.
    """
    there = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    wanted = {name for said in claims.values() for name, one in said.items() if isinstance(one, Same)}
    # After all techniques have finished: this is what training ended with.
    found = {name: Same.as_(whole(value.detach())) for name, value in there.items() if name in wanted}
    return {
        key: {
            name: found.get(name, one) if isinstance(one, Same) else one
            for name, one in said.items()
            if name in found or not isinstance(one, Same)
        }
        for key, said in claims.items()
    }


def refuse(lines: list[str], what: str, changed_by: Iterable[str]) -> None:
    """Refuse weights that are not what the receipt says.

    Args:
        lines: Of `differences`.
        what: The model or the file.
        changed_by: Classes of the callbacks that may have changed it.

    Raises:
        ReceiptError: If there are lines.
    """
    if not lines:
        return
    others = ", ".join(dict.fromkeys(changed_by))
    who = f"it may have been changed by {others}; a callback" if others else "no other callback was there; a hook"
    more = f"; and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
    raise ReceiptError(
        what,
        f"weights must be what the receipt says, got {'; '.join(lines[:_TOLD])}{more}",
        f"{who} that writes into weights must do so before training ends",
    )
