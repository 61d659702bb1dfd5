"""Start-up check: refuse techniques that cannot be combined with each other or with the run environment.

Techniques declare this in their configs: `conflicts` for whole techniques, `refusals` for options.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shared_core.config.environments import EVERY_TECHNIQUE, RUN_ENVIRONMENTS
from shared_core.engine.registry import REGISTRY, in_order
from shared_core.errors import CompatibilityError

if TYPE_CHECKING:
    from shared_core.engine.technique import Context, Technique


def refusal(first: str, second: str) -> str | None:
    """Return why two techniques, or a technique and a run environment, cannot be combined. None if they can.

    The reason also names the options that allow the combination, if any.

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
    # A config's own entry overrides the one for all techniques.
    return config.conflicts.get(other) or by_default


def is_allowed(first: str, second: str, recipe: Mapping[str, Any]) -> bool:
    """Return True if a technique declares this conflict but its options allow the combination."""
    return any(
        key in recipe and _declared(key, other) is not None and recipe[key].allows(other, recipe)
        for key, other in ((first, second), (second, first))
    )


def remarks(recipe: Mapping[str, Any]) -> list[str]:
    """Return a line for each allowed combination that the user should know about. They become notes of the receipt."""
    return [line for config in recipe.values() for line in config.remarks(recipe)]


def check(keys: Iterable[str], run_environment: Iterable[str] = ()) -> None:
    """Refuse a combination that cannot work, before training starts.

    Args:
        keys: A recipe, whose options may allow a combination, or recipe keys alone.
        run_environment: Keys of `RUN_ENVIRONMENTS` that apply.

    Raises:
        CompatibilityError: Names both sides and the reason for every refused pair, and what the recipe lacks.
    """
    recipe = keys if isinstance(keys, Mapping) else None
    keys, run_environment = list(keys), list(run_environment)
    # List each pair once: `refusal` checks both sides.
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
    """Return one row per technique and one column per technique or run environment: ``"yes"`` or the reason."""
    columns = [*REGISTRY, *RUN_ENVIRONMENTS]
    return [
        {
            "technique": key,
            **{column: "-" if column == key else refusal(key, column) or "yes" for column in columns},
        }
        for key in REGISTRY
    ]


def refuse_late_weights(techniques: Mapping[str, Technique]) -> None:
    """Refuse a technique that replaces the weights after one that depends on them has finished.

    Raises:
        CompatibilityError: Names both, and what the first must declare.
    """
    from shared_core.engine.protocols import FollowsWeights, offering  # it loads torch

    order = in_order(techniques, "finish")
    following = [key for key, _ in offering(techniques, FollowsWeights)]
    for key, one in techniques.items():
        late = [other for other in following if one.replaces_weights and order.index(other) < order.index(key)]
        if late:
            rule = f"replaces the weights after {late[0]} has finished, which depends on them"
            raise CompatibilityError(key, rule, f"add {late[0]!r} to finishes_before in {type(one.config).__name__}")


def refuse_without_batches(context: Context) -> None:
    """Refuse techniques that need training batches at the end of a run, if the loop gives none.

    Raises:
        CompatibilityError: If one technique replaces the weights, and another needs batches afterwards.
    """
    replacing = [key for key, one in context.techniques.items() if one.replaces_weights]
    wanting = [key for key, plan in context.plans.items() if plan.looks_at_batches]
    if replacing and wanting and (remedy := context.services.lacks_batches):
        raise CompatibilityError(
            wanting[0], f"needs training batches after {replacing[0]} replaces the weights, but has none", remedy
        )
