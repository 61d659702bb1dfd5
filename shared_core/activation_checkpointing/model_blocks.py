"""Which modules of a model are its blocks: the repeated ones that a forward runs one after another."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shared_core.errors import MatchError
from shared_core.modules.matching import own_class, plain_name

_Group = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks, in the order of its forward as far as modules tell it.

    Blocks are children of one class, made of several modules, in a ``ModuleList`` or ``Sequential``: layers of a
    transformer, residual blocks of every stage of a CNN. Where lists hold stages, which differ in shape and hold blocks
    themselves, the blocks inside are meant. Without such lists: attributes of one class, then the parts of the longest
    plain ``Sequential``.

    Args:
        model: Any module.

    Returns:
        Names as in ``named_modules()``, without what wrappers insert.

    Raises:
        MatchError: If nothing repeats.

    Example:
        >>> def block():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> find_blocks(nn.Sequential(nn.Linear(2, 4), nn.Sequential(block(), block(), block())))
        ['1.0', '1.1', '1.2']
    """
    groups = list(_groups(model, "", in_lists=True))
    # Classes, not instances: another technique may have swapped them (`own_class` sees through).
    kinds = [own_class(group[0][1]) for group in groups]
    repeated = [g for g, kind in zip(groups, kinds, strict=True) if len(g) > 1 or kinds.count(kind) > 1]
    classes = {own_class(group[0][1]) for group in repeated} - {nn.Sequential}  # its lists of such are such themselves
    found = list(_repeated(model, "", {name for group in repeated for name, _ in group}, classes))
    found = found or [name for group in groups for name, _ in group]  # one layer that is called many times
    found = found or [name for group in _groups(model, "", in_lists=False) for name, _ in group]
    if not found:
        plain = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential)]
        longest = max(plain, key=lambda named: len(named[1]), default=("", nn.Sequential()))
        prefix = f"{longest[0]}." if longest[0] else ""
        found = [prefix + name for name, _ in longest[1].named_children()] if len(longest[1]) > 3 else []
    if not found:
        raise MatchError(
            "checkpointing",
            f"{type(model).__name__} must have repeated blocks, got no list of modules of one class",
            "name the modules to recompute with include, or give apply_segments their names",
        )
    return [plain_name(name) for name in found]


def _groups(module: nn.Module, prefix: str, *, in_lists: bool, in_stage: bool = False) -> Iterator[_Group]:
    """Yield the outermost groups of blocks: children of a list, or of any module, that share a class."""
    # Stages do not lie inside each other: what differs in shape inside one are blocks, whatever lists these hold.
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    compound = [(name, child) for name, child in children if _is_compound(child)]
    by_class: dict[type[nn.Module], _Group] = {}
    for name, child in compound:
        by_class.setdefault(own_class(child), []).append((name, child))
    taken: set[str] = set()
    stages: set[str] = set()
    for group in by_class.values():
        # In lists: all compound children of one class. Elsewhere: several of one class beside each other.
        if is_list and len(by_class) == 1 if in_lists else len(group) > 1:
            if in_stage or not _are_stages(group):
                taken |= {name for name, _ in group}
                yield group
            elif len(group) > 1:
                stages |= {name for name, _ in group}
    for name, child in children:
        if name not in taken:
            yield from _groups(child, f"{name}.", in_lists=in_lists, in_stage=in_stage or name in stages)


def _repeated(module: nn.Module, prefix: str, names: set[str], classes: set[type[nn.Module]]) -> Iterator[str]:
    """Yield the outermost named blocks, and those of their classes that stand alone in a list: a stage of one."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        if f"{prefix}{name}" in names or (is_list and own_class(child) in classes):
            yield f"{prefix}{name}"
        else:
            yield from _repeated(child, f"{prefix}{name}.", names, classes)


def _is_compound(module: nn.Module) -> bool:
    """Whether a module is made of several, and no mere list of them without a forward."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not is_list and next(module.parameters(), None) is not None and next(module.children(), None) is not None


def _are_stages(group: _Group) -> bool:
    """Whether modules hold the blocks rather than are them: no two of one shape, and lists of blocks inside."""
    # Stages of a CNN have other shapes each and hold lists of blocks; equal shapes are blocks themselves.
    shapes = [tuple((n, tuple(p.shape)) for n, p in module.named_parameters()) for _, module in group]
    if len(set(shapes)) < len(shapes):
        return False
    return any(next(_groups(module, "", in_lists=True), None) is not None for _, module in group)
