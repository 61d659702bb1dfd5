"""The weights in a checkpoint: as the user's plain model loads them, and beside them what training goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.session import Session
from shared_core.soup.sources import RAW_KEY

_BAKED_ALONE = "eff_baked_names"
"""Names that only baked weights have: a factorised layer's."""


def bake_(session: Session, checkpoint: dict[str, Any]) -> None:
    """Put baked weights in the place of a checkpoint's; those that differ, or go by other names, lie beside them."""
    weights = checkpoint["state_dict"]
    baked = session.bake(weights)
    raw = {name: value for name, value in weights.items() if not _same(value, baked.get(name))}
    checkpoint["state_dict"] = type(weights)(baked)
    if raw:
        checkpoint[RAW_KEY] = raw
    if alone := [name for name in baked if name not in weights]:
        checkpoint[_BAKED_ALONE] = alone


def latent_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's weights as they were before `bake_`."""
    alone = checkpoint.get(_BAKED_ALONE, ())
    kept = {name: value for name, value in checkpoint["state_dict"].items() if name not in alone}
    return {**kept, **checkpoint.get(RAW_KEY, {})}


def _same(value: Any, baked: Any) -> bool:
    if value is baked:
        return True
    return isinstance(value, Tensor) and isinstance(baked, Tensor) and torch.equal(value, baked)
