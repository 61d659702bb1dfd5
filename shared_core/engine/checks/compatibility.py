"""Refuse what cannot be combined, and say why: technique × technique and technique × run environment, at start.

Techniques declare it in their configs: `conflicts` for whole techniques, `refusals` for options.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shared_core.config.conflicts import EVERY_TECHNIQUE, RUN_ENVIRONMENTS
from shared_core.engine.registry import REGISTRY
from shared_core.errors import CompatibilityError

if TYPE_CHECKING:
    from shared_core.engine.technique import Context


def refusal(first: str, second: str) -> str | None:
    """Return why two techniques, or a technique and a run environment, cannot be combined; None if they can.

    The reason also says under which options they can, if there are such.

    Example:
        >>> refusal("prune", "qat") is None, refusal("loss_scale", "bf16") is None
        (True, False)
    """
    return _declared(first, second) or _declared(second, first)


def _declared(key: str, other: str) -> str | None:
    if key not in REGISTRY:
        return None
    config = REGISTRY[key].config_class
    by_default = None if other in config.works_in else EVERY_TECHNIQUE.get(other)
    # A config's own word counts before what holds of every technique.
    return config.conflicts.get(other) or by_default


def is_allowed(first: str, second: str, recipe: Mapping[str, Any]) -> bool:
    """Return True if the options of the technique that declares a conflict allow it all the same."""
    return any(
        key in recipe and _declared(key, other) is not None and recipe[key].allows(other, recipe)
        for key, other in ((first, second), (second, first))
    )


def remarks(recipe: Mapping[str, Any]) -> list[str]:
    """Return a line for each combination that is allowed and that the user must know about; the receipt keeps them."""
    return [line for config in recipe.values() for line in config.remarks(recipe)]


def check(keys: Iterable[str], run_environment: Iterable[str] = ()) -> None:
    """Refuse a combination that cannot be right, before any work.

    Args:
        keys: A recipe, whose options decide too, or recipe keys alone, which meet no condition.
        run_environment: Keys of `RUN_ENVIRONMENTS` that hold.

    Raises:
        CompatibilityError: Naming both sides and the reason, for every refused pair, and what a recipe lacks.
    """
    recipe = keys if isinstance(keys, Mapping) else None
    keys, run_environment = list(keys), list(run_environment)
    # Each pair once: `refusal` asks both sides.
    pairs = [*itertools.combinations(keys, 2), *itertools.product(keys, run_environment)]
    lines = [
        f"{first} cannot be combined with {RUN_ENVIRONMENTS.get(second, second)}: {reason}"
        for first, second in pairs
        if (reason := refusal(first, second)) and (recipe is None or not is_allowed(first, second, recipe))
    ]
    if recipe is not None:
        lines += [line for config in recipe.values() for line in config.refusals(recipe, run_environment)]
    if lines:
        raise CompatibilityError("recipe", "\n".join(lines))


def matrix() -> list[dict[str, str]]:
    """Return one row a technique, one column a technique or run environment: ``"yes"`` or the reason why not."""
    columns = [*REGISTRY, *RUN_ENVIRONMENTS]
    return [
        {
            "technique": key,
            **{column: "-" if column == key else refusal(key, column) or "yes" for column in columns},
        }
        for key in REGISTRY
    ]


def refuse_without_batches(context: Context) -> None:
    """Refuse at the start what would look at training batches at the end, where the loop has none to look at.

    Raises:
        CompatibilityError: If one technique replaces the weights, and another must see batches then.
    """
    remedy = getattr(context.services, "lacks_batches", "")
    replacing = [key for key, one in context.techniques.items() if one.replaces_weights]
    wanting = [key for key, plan in context.plans.items() if plan.looks_at_batches]
    if remedy and replacing and wanting:
        raise CompatibilityError(
            wanting[0], f"must see training batches once {replacing[0]} has put in its weights, got none", remedy
        )
