"""What quantised layers learn stays out of state dicts, so that checkpoints are those of the plain model."""

from __future__ import annotations

from typing import Any

from torch import nn

LEARNED = ("weight_scale", "input_scale", "input_zero_point", "input_clip")
"""Names of the parameters that a layer learns beside its own."""


class PlainState(nn.Module):
    """A layer whose learned scales are trained like any parameter, but that no state dict holds."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in LEARNED:
            destination.pop(prefix + name, None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        missing: list[str] = args[2]
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing[:] = [name for name in missing if name.removeprefix(prefix) not in LEARNED]
