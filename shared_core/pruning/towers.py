"""Towers: the parts of a model at its top, such as a vision and a text encoder, whose weights may differ in size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_FEW = 0.1
"""A tower that keeps less than this of the share that the others keep is told."""


def tower_names(names: Sequence[str]) -> list[str]:
    """Return for each weight the tower that it is in.

    Towers are the modules at the top; modules around all others but single layers are passed, numbered ones are not
    taken apart.

    Example:
        >>> tower_names(["model.vision.0.fc.weight", "model.vision.1.fc.weight", "model.text.a.weight",
        ...              "model.text.b.weight", "head.weight"])
        ['model.vision', 'model.vision', 'model.text', 'model.text', 'head']
        >>> tower_names(["model.layers.0.fc.weight", "model.layers.1.fc.weight", "head.weight"])
        ['model.layers', 'model.layers', 'head']
    """
    paths = [name.split(".")[:-1] for name in names]
    around: list[str] = []
    while True:
        layers: dict[str, set[tuple[str, ...]]] = {}
        for path in paths:
            if path[: len(around)] == around and len(path) > len(around):
                layers.setdefault(path[len(around)], set()).add(tuple(path))
        several = [child for child, inside in layers.items() if len(inside) > 1]
        if any(child.isdecimal() for child in layers) or len(several) != 1:
            break
        around.append(several[0])
    numbered = any(child.isdecimal() for child in layers)
    depth = len(around) + (not numbered)
    return [".".join(path[: depth if path[: len(around)] == around else 1]) for path in paths]


def tower_notes(where: str, weights: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a line for each tower of several matrices that keeps next to nothing while the others keep their weights.

    Example:
        >>> layers = ("eye.a", "eye.b", "text.a", "text.b")
        >>> lost = {f"{layer}.weight": (100, 98 if "eye" in layer else 5) for layer in layers}
        >>> tower_notes("prune", lost)[0].partition(":")[2].partition(":")[0]
        ' 98.0 % of the weights of eye is gone, of the others 5.0 %'
    """
    counts: dict[str, list[int]] = {}
    for tower, (size, gone) in zip(tower_names([*weights]), weights.values(), strict=True):
        size_, gone_, matrices = counts.get(tower, [0, 0, 0])
        counts[tower] = [size_ + size, gone_ + gone, matrices + 1]
    sizes, gones = (sum(count[i] for count in counts.values()) for i in (0, 1))
    notes = []
    for tower, (size, gone, matrices) in counts.items():
        if matrices < 2 or size == sizes:
            continue
        share, others = gone / size, (gones - gone) / (sizes - size)
        if 1 - share < _FEW * (1 - others):
            notes.append(
                f"{where}: {share:.1%} of the weights of {tower} is gone, of the others {others:.1%}: one threshold is "
                "for all; scope tower has one for each of them".replace("%", " %")
            )
    return notes
