"""Saved factorised models, back in a model of the user's class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shared_core.checkpoint_formats import load_checkpoint
from shared_core.checkpoint_formats.plain import check_values, unlike
from shared_core.errors import CheckpointError
from shared_core.low_rank.layers import CHANNEL, LINEAR, SPATIAL, LowRankLayer, is_transposed, put_in_, replace_
from shared_core.modules.own_forward import fast_paths_off

_FIRST, _SECOND = ".first.weight", ".second.weight"
WEIGHTS_FILE = "low_rank.safetensors"
"""A name that `from_pretrained` does not look for: it would load the rest, and draw the factorised layers anew."""
_OURS, _PLAIN = "low_rank*.safetensors", "model*.safetensors"


def load(model: nn.Module, weights: Path | str | Mapping[str, Tensor]) -> nn.Module:
    """Return the model, factorised as saved weights are and holding them.

    Ranks and schemes are read from the names and shapes of the weights, so every file will do: what a trainer saved
    at the end or on the way, what `eff low-rank` wrote, a state dict.

    Args:
        model: The user's model before it was factorised, its weights need not be trained; changed in place. Of
            transformers ``AutoModel….from_config(AutoConfig.from_pretrained(folder))``.
        weights: A folder with ``.safetensors``, such a file, a Lightning ``.ckpt``, or a state dict.

    Raises:
        CheckpointError: If it cannot be read, or is of another model.

    Example:
        >>> import torch
        >>> from shared_core.low_rank import LowRankConfig, factorize
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        >>> _ = factorize(net, LowRankConfig(rank=8))
        >>> fresh = load(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), net.state_dict())
        >>> torch.equal(fresh(torch.ones(1, 64)), net(torch.ones(1, 64)))
        True
    """
    state = dict(weights) if isinstance(weights, Mapping) else _own_names(model, _read(Path(weights)))
    structure = read_structure(model, state)
    layers = put_in_(model, structure)
    try:
        _check(model, state)
    except CheckpointError:
        for layer in layers.values():
            replace_(model, layer, layer.dense)
        raise
    for layer in layers.values():
        layer.release()
    fast_paths_off(model, (LowRankLayer,))
    model.load_state_dict(state, strict=False)
    return model


def _check(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    missing, others = unlike(model, state)
    if missing or others:
        raise CheckpointError(
            "low_rank",
            f"weights must be those of a factorised {type(model).__name__}, got missing {missing[:3]} and others "
            f"{others[:3]}",
            "build the model as it was before it was factorised",
        )
    check_values(model, state, "low_rank")


def read_structure(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return rank and scheme of the layers that weights hold in two factors, by name."""
    modules: dict[str, Any] = dict(model.named_modules())
    structure = {}
    for key, first in state.items():
        name = key.removesuffix(_FIRST)
        second = state.get(name + _SECOND)
        if name == key or second is None:
            continue
        layer = modules.get(name)
        if not (isinstance(layer, nn.Linear | nn.Conv2d) or (layer is not None and is_transposed(layer))):
            continue  # a user's own module with parts of these names
        scheme = LINEAR
        if isinstance(layer, nn.Conv2d):
            scheme = CHANNEL if second.shape[2:].numel() == 1 and first.shape[2:] == layer.kernel_size else SPATIAL
        structure[name] = {"rank": len(first), "scheme": scheme}
    if not structure:
        raise CheckpointError(
            "low_rank",
            f"weights must hold factorised layers of {type(model).__name__}, got none",
            "weights of the whole model need no load of ours",
        )
    return structure


def hide(folder: Path | str) -> None:
    """Rename the weights of a factorised model in a folder, shards too, so that `from_pretrained` finds none."""
    for old in Path(folder).glob(_OURS):
        old.unlink()
    for file in Path(folder).glob(_PLAIN):
        file.replace(file.with_name(file.name.replace("model", "low_rank", 1)))
    (Path(folder) / "model.safetensors.index.json").unlink(missing_ok=True)


def _own_names(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the model's names, where its library saves them by others."""
    from shared_core.front_ends.finding import own_weights

    parts = ("first.weight", "second.weight", "second.bias")
    names = dict.fromkeys(
        [*model.state_dict(), *(f"{name}.{part}" for name, _ in model.named_modules() for part in parts)]
    )
    return own_weights(model, list(names), state)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(path.glob(_OURS)) or sorted(path.glob(_PLAIN)) if path.is_dir() else [path]
    try:
        if not files:
            raise FileNotFoundError("no .safetensors file")
        if path.suffix == ".ckpt":
            return dict(load_checkpoint(path)["state_dict"])
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except Exception as error:  # libraries raise whatever the damage makes it
        raise CheckpointError(
            "low_rank", f"{path} must hold safetensors of a factorised model, got {type(error).__name__}: {error}"
        ) from error
