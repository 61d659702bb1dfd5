"""Give a technique's callback its config options as typed keyword arguments, for editors and LightningCLI."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from shared_core.config.options import TechniqueConfig, type_text
from shared_core.engine.registry import REGISTRY, registration
from shared_core.errors import require

_Class = TypeVar("_Class", bound=type)


def _parameters(
    config: type[TechniqueConfig], defaults: dict[str, Any], *, positional: bool
) -> typing.Iterator[tuple[inspect.Parameter, str]]:
    hints = config.hints()
    for field in dataclasses.fields(config):
        default = defaults.get(field.name, field.default)
        can_be_first = positional and field.name == config.switch
        parameter = inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if can_be_first else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=field.metadata.get("flag_type", hints[field.name]),
        )
        yield parameter, config.meaning(field)


def _inherited(cls: Any, key: str) -> Any:
    def __init__(self: Any, *switch: Any, **options: Any) -> None:  # noqa: N807
        super(cls, self).__init__(*switch, **options)

    __init__.__qualname__, __init__.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    cls.key, cls.__init__ = key, __init__
    return __init__


def typed_options(key: str, **defaults: Any) -> Callable[[_Class], _Class]:
    """Return a class decorator that puts a technique's options into the signature of ``__init__(..., **options)``.

    A class without its own ``__init__`` gets one that calls its base's.

    jsonargparse reads types and choices from the signature and help from the docstring's ``Args``. The repr is made
    from the instance's `recipe` (a plugin's `eff_recipe`) and from `given`, the other arguments of ``__init__``.

    Args:
        key: The technique's recipe key.
        **defaults: Defaults that differ from the config's.
    """

    def decorate(cls: _Class) -> _Class:
        init: Any = cls.__dict__.get("__init__") or _inherited(cls, key)
        own = inspect.signature(init, eval_str=True)
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        kept = [p for p in own.parameters.values() if p.kind not in several]
        takes_switch = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in own.parameters.values())
        options = list(_parameters(registration(key).config_class, defaults, positional=takes_switch))
        # The positional option comes first, the others in their order.
        parameters = sorted([*kept, *(parameter for parameter, _ in options)], key=lambda parameter: parameter.kind)
        # inspect and LightningCLI read this signature. The function itself takes **options.
        init.__signature__ = inspect.Signature(parameters)
        init.__annotations__ = {p.name: p.annotation for p in parameters if p.name != "self"}
        doc = inspect.cleandoc(cls.__doc__ or "")
        head = doc if "\nArgs:" in doc else f"{doc}\n\nArgs:"
        lines = [f"    {parameter.name}: {text}" for parameter, text in options]
        cls.__doc__ = "\n".join([head, *lines, ""])

        def text(made: Any) -> str:
            given = {p.name: value for p in kept[1:] if (value := made.given[p.name]) != p.default}
            config: TechniqueConfig = (getattr(made, "eff_recipe", None) or made.recipe)[key]
            return config.call_text(type(made).__name__, **given)

        cls.__repr__ = text  # type: ignore[assignment, method-assign]
        return cls

    return decorate


class OneTechnique:
    """Mixin for a callback with one technique, whose options are keyword arguments. List it before the callback class.

    The class name selects the registered technique. The option that enables it can be positional.

    Example:
        ``class Pruning(OneTechnique, EffCallback): ...``
    """

    key: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        key = next((one.key for one in REGISTRY.values() if one.technique_name == cls.__name__), None)
        if key is not None and not cls.key:
            typed_options(key)(cls)

    def __init__(self, *switch: Any, **options: Any) -> None:
        name = type(self).__name__
        require(self.key, name, "no technique's class has this name", "name the callback like its technique's class")
        config = registration(self.key).config_class
        switches = [config.switch, *config.other_switches]
        if switch:
            rule = f"only {config.switch} can be given without its name, got {len(switch)} values"
            require(len(switch) == 1, name, rule, f"write {name}({switch[0]!r}, OPTION=VALUE)")
            rule = f"{' or '.join(switches)} must be named, got {switch[0]!r}"
            require(len(switches) == 1, name, rule, f"write {name}({config.switch}={switch[0]!r})")
            require(config.switch not in options, name, f"{config.switch} must be given once, got it twice")
            options[config.switch] = switch[0]
        field = config.__dataclass_fields__[config.switch]
        hint = field.metadata.get("flag_type", config.hints()[config.switch])
        choices = [one for one in typing.get_args(hint) if one != "none"] if typing.get_origin(hint) is Literal else []
        value = repr(choices[0]) if choices else type_text(hint).upper()
        is_given = not options.keys().isdisjoint(switches)
        if not is_given:
            config.check_names(options)  # a misspelled switch is named
        rule = f"{' or '.join(switches)} must be given, got none"
        require(is_given, name, rule, f"write {name}({config.switch}={value})")
        super().__init__({self.key: options})  # type: ignore[call-arg]
