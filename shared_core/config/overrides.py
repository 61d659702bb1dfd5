"""Options that differ between modules: one form for every technique that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shared_core.config.options import TechniqueConfig


class OverridableConfig(TechniqueConfig):
    """Base of configs whose option ``overrides`` sets others of their options for some modules.

    A subclass declares the option itself, and names in `overridable` what it may set.
    """

    overridable: ClassVar[tuple[str, ...]] = ()
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        """Write a mapping of overrides as the list that flags give, then check every option."""
        if isinstance(self.overrides, Mapping):
            pairs = [
                f"{pattern}:{name}={value}"
                for pattern, options in self.overrides.items()
                for name, value in (options.items() if isinstance(options, Mapping) else [(options, "")])
            ]
            object.__setattr__(self, "overrides", tuple(pairs))
        super().__post_init__()

    def override_options(self) -> list[tuple[str, str, str]]:
        """Return (pattern, option, value) of every override.

        Raises:
            ConfigError: If one is not of that form, or names an option that modules cannot differ in.
        """
        found = []
        for entry in self.overrides:
            pattern, colon, rest = entry.rpartition(":")
            name, equals, value = rest.partition("=")
            if not (colon and equals and pattern and value) or name not in self.overridable:
                raise self._error(
                    "overrides", f"must be PATTERN:OPTION=VALUE with an option of {', '.join(self.overridable)}"
                )
            found.append((pattern, name, value))
        return found
