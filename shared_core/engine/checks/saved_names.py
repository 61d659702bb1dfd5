"""The model's own names of weights that a file holds under shorter ones, as after ``model.backbone.state_dict()``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Size, Tensor, nn

from shared_core.checkpoint_formats.files import LazyTensors
from shared_core.modules.matching import plain_name

_SHOWN = 3


def under_own_names(weights: Mapping[str, Tensor], model: nn.Module) -> tuple[Mapping[str, Tensor], str]:
    """Return a file's weights under the model's names, and why it does not know them, if so.

    Names that lack a prefix get it if they all fit one module of the model in name and shape. A module with several
    names, such as a shared encoder, counts as one.

    Args:
        weights: Of the file. Values may be loaded lazily.
        model: The model that they were saved from, whole or in part.

    Returns:
        The weights, and an empty text or the reason why none or not all of them could be named.

    Example:
        >>> model = nn.ModuleDict({"encoder": nn.Linear(4, 2), "head": nn.Linear(2, 3)})
        >>> list(under_own_names(model["encoder"].state_dict(), model)[0])
        ['encoder.weight', 'encoder.bias']
        >>> twins = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> under_own_names(twins[0].state_dict(), twins)[1]
        'names without a prefix, such as weight, fit 0 and 1 of the model'
    """
    saved = {plain_name(name): name for name in weights}
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own = {plain_name(name): value for name, value in held}
    unknown = [name for name in saved if name not in own]
    if not unknown:
        return weights, ""
    known = {name: source for name, source in saved.items() if name in own}
    shapes = {name: weights[source].shape for name, source in saved.items() if isinstance(weights[source], Tensor)}
    # A module's file may share a name with the whole model, so all its names are tried first.
    for names, kept in ((list(saved), {}), (unknown, known)):
        fitting = {
            prefix: {prefix + name: saved[name] for name in places}
            for prefix, places in _fitting({name: shapes[name] for name in names if name in shapes}, own).items()
            if known.keys() - kept.keys() <= {*places} and not any(prefix + name in kept for name in places)
        }
        if len({tuple(id(own[name]) for name in placed) for placed in fitting.values()}) > 1:
            which = " and ".join(prefix.removesuffix(".") for prefix in fitting)
            return weights, f"names without a prefix, such as {unknown[0]}, fit {which} of the model"
        if fitting:
            sources = {name: at for one in (kept, *fitting.values()) for name, at in one.items()}
            return LazyTensors(sources, weights.__getitem__), ""
    if known:
        return weights, ""
    return weights, f"none of its names is one of the model's: {', '.join(unknown[:_SHOWN])}"


def _fitting(shapes: Mapping[str, Size], own: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return prefixes that make names those of tensors of these shapes, with the names that any prefix completes."""
    prefixes: dict[str, set[str]] = {name: set() for name in shapes}
    for name in own:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if (end := ".".join(parts[cut:])) in prefixes:
                prefixes[end].add(name.removesuffix(end))
    places = [name for name, found in prefixes.items() if found]
    common = set[str].intersection(*(prefixes[name] for name in places)) if places else set[str]()
    return {
        prefix: places for prefix in sorted(common) if all(own[prefix + name].shape == shapes[name] for name in places)
    }
