"""Flags for Hugging Face scripts, generated from the options of every technique."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from transformers import TrainingArguments

from shared_core.config.options import TechniqueConfig, default_text, type_text
from shared_core.config.training_time import Position
from shared_core.engine.recipe import PARTIAL_FLAG, Recipe
from shared_core.engine.registry import REGISTRY, flags
from shared_core.errors import ConfigError

_FLAGS = flags()
"""Techniques registered before this module was imported, since its dataclasses are made now."""
RECIPE_FLAG = "eff_recipe"
_FIRST_READ = "auto_find_batch_size"


class _GroupName:
    """Names the flags' own group in ``--help``, only for the dataclass that holds nothing else."""

    def __get__(self, instance: object, owner: type) -> str:
        if owner is EffFlags:
            return "efficient training"
        # in a subclass, all flags of TrainingArguments would move into this group
        raise AttributeError("_argument_group_name")


def flag_type(hint: Any, metadata: typing.Mapping[str, Any]) -> Any:
    """Return an option's type as `HfArgumentParser` can read it. None always means "not given".

    Example:
        >>> flag_type(tuple[str, ...], {})
        list[str] | None
    """
    if hint in (Position, Position | None, Any):
        # A position is 500, 0.3 or 2ep: kept as text, since argparse would convert all to one type.
        return metadata.get("flag_type", str) | None
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        # `X | None`: the first type that is not None.
        return flag_type(next(arg for arg in get_args(hint) if arg is not type(None)), metadata)
    if origin is tuple:
        return list[get_args(hint)[0]] | None  # type: ignore[misc]
    if origin is Literal:
        if "flag_type" in metadata:
            return metadata["flag_type"] | None
        return typing.Optional[hint]  # noqa: UP045
    return hint | None


def _argument(text: str, kind: str) -> Any:
    # argparse formats help with %; the last part prints nothing, and prevents "(default: None)"
    metadata = {"help": text.replace("%", "%%") + "%(default).0s"}
    if kind == "true | false" or " " not in kind:  # argparse shows the choices of other kinds
        metadata["metavar"] = {"true | false": "true|false", "list": "ITEM"}.get(kind, kind.upper())
    return dataclasses.field(default=None, metadata=metadata)


def _fields() -> list[tuple[str, Any, Any]]:
    fields: list[tuple[str, Any, Any]] = []
    for flag, (key, option) in _FLAGS.items():
        config_class: type[TechniqueConfig] = REGISTRY[key].config_class
        hint = config_class.hints()[option.name]
        text = config_class.meaning(option)
        if option.name in (config_class.switch, *config_class.other_switches):
            text += f" Switches {key} on."
        elif default := default_text(option.default):
            text += f" Default: {default}."
        fields.append(
            (flag, flag_type(hint, option.metadata), _argument(text, type_text(option.metadata.get("flag_type", hint))))
        )
    help_text = "A YAML or JSON recipe file, used with or instead of the single flags."
    fields.append((RECIPE_FLAG, str | None, _argument(help_text, "file")))
    help_text = "Train even if a technique reaches less than half of the weights that multiply activations."
    fields.append((PARTIAL_FLAG, bool | None, _argument(help_text, "true | false")))
    REGISTRY.has_made_flags = True
    return fields


class EffFlags:
    """The flags alone, with their own help group: ``HfArgumentParser((TrainingArguments, EffFlags))``.

    A dataclass with one field per option of every technique. None always means "not given".

    Raises:
        ConfigError: If a flag breaks its rule. The message has the option, the rule and the value.

    Example:
        >>> EffFlags(prune_sparsity="8e-1").recipe["prune"].sparsity
        0.8
    """

    _argument_group_name = _GroupName()

    if typing.TYPE_CHECKING:  # `dataclass` keeps an existing __init__

        def __init__(self, **flags: Any) -> None: ...

    def __post_init__(self) -> None:
        """Check every flag, and store parsed values: YAML gives ``1e-3`` as text."""
        from_flags = self._flags_recipe()
        # Merge here to find a technique that both switch on, at start.
        from_flags.merged(self._file_recipe())
        for key, config in from_flags.items():
            for name, value in config.to_dict().items():
                if getattr(self, f"{key}_{name}") is not None:
                    setattr(self, f"{key}_{name}", value)
        inherited = getattr(super(), "__post_init__", None)
        if inherited is not None:
            inherited()

    @property
    def recipe(self) -> Recipe:
        """The recipe that the flags and the recipe file switch on."""
        return self._flags_recipe().merged(self._file_recipe())

    def _flags_recipe(self) -> Recipe:
        return Recipe.from_flags({flag: getattr(self, flag) for flag in (*_FLAGS, PARTIAL_FLAG)})

    def _file_recipe(self) -> Recipe:
        file = getattr(self, RECIPE_FLAG)
        if file is None:
            return Recipe({})
        return Recipe.from_json(Path(file)) if str(file).endswith(".json") else Recipe.from_yaml(Path(file))

    def mark_taken(self) -> None:
        """Record that a trainer runs these techniques."""
        self.__dict__["_eff_taken"] = self.recipe.to_dict()

    def check_taken(self) -> None:
        """Raise an error if a trainer would train without the techniques.

        Raises:
            ConfigError: If no trainer took the flags, or they changed afterwards.
        """
        recipe, taken = self.recipe.to_dict(), self.__dict__.get("_eff_taken", {})
        # Compare with the flags when they were taken: a script may have changed its arguments since.
        if recipe != taken:
            changed = ", ".join(key for key in {**recipe, **taken} if recipe.get(key) != taken.get(key))
            raise ConfigError(
                "hf",
                f"no trainer applied {changed}: a stock Trainer got these arguments, or they were changed "
                "after it was constructed",
                "use EffTrainer, or call efftrain.hf.attach(trainer) before trainer.train(), with the flags set before",
            )

    def get_warmup_steps(self, num_training_steps: int) -> Any:
        """Check that the flags are taken, and return the trainer's value: trainers with their own loop call this."""
        self.check_taken()
        return super().get_warmup_steps(num_training_steps)  # type: ignore[misc]


class _ReadAsTrainingBegins:
    """A field that checks the flags when the Trainer's loop reads it, the one place that every run passes.

    ``Trainer._inner_training_loop`` (transformers 5.17 to 5.23) reads it first, with any optimizer and schedule.
    All other readers, such as ``to_dict`` and pickle, get the plain value.
    """

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, args: Any, owner: type) -> Any:
        if args is None:
            return self._default
        # The loop's first read of a field: from here on the run trains, with or without techniques.
        if sys._getframe(1).f_code.co_name == "_inner_training_loop":
            args.check_taken()
        return args.__dict__.get(self._name, self._default)

    def __set__(self, args: Any, value: Any) -> None:
        args.__dict__[self._name] = value


EffFlags.__annotations__ = {}
for _name, _hint, _field in _fields():
    EffFlags.__annotations__[_name] = _hint
    setattr(EffFlags, _name, _field)
dataclasses.dataclass(repr=False, eq=False)(EffFlags)


def _blank(arguments_class: type) -> Any:
    # Unpickled without __init__: the fields come from the saved dict.
    return object.__new__(with_eff(arguments_class))


@functools.cache
def with_eff(arguments_class: type) -> type:
    """Return `arguments_class` with a flag for every option of every technique.

    Args:
        arguments_class: ``Seq2SeqTrainingArguments``, TRL's ``SFTConfig``, or any subclass of ``TrainingArguments``.

    Raises:
        ConfigError: If one of its fields has the name of a flag.

    Example:
        ``EffSFTConfig = with_eff(SFTConfig)``
    """
    if issubclass(arguments_class, EffFlags):
        return arguments_class
    ours = {*_FLAGS, RECIPE_FLAG, PARTIAL_FLAG}
    taken = {field.name for field in dataclasses.fields(cast(Any, arguments_class))} & ours
    if taken:
        raise ConfigError(
            "hf", f"{arguments_class.__name__} must not have fields named like flags, got {sorted(taken)}"
        )

    def set_flags(self: Any, *args: Any, **options: Any) -> None:
        self.__dict__.update({name: options.pop(name, None) for name in ours})
        arguments_class.__init__(self, *args, **options)

    def equal(self: Any, other: Any) -> bool:
        same = arguments_class.__eq__(self, other)
        return same is True and all(getattr(self, name) == getattr(other, name) for name in ours)

    signature = inspect.signature(arguments_class)
    flags = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in sorted(ours)]
    name = f"Eff{arguments_class.__name__}"
    namespace = {
        "__doc__": f"{arguments_class.__name__} with the flags of every technique; `recipe` is what they switch on.",
        "__module__": __name__,
        # not the dataclass's own: compiling it for 300 fields takes a tenth of our import time
        "__init__": set_flags,
        "__signature__": signature.replace(parameters=[*signature.parameters.values(), *flags]),
        "__eq__": equal,
        # rebuilt from the base class, so that it unpickles in a process that has not made it yet
        "__reduce__": lambda self: (_blank, (arguments_class,), self.__dict__),
        _FIRST_READ: _ReadAsTrainingBegins(_FIRST_READ, getattr(arguments_class, _FIRST_READ)),
    }
    made = types.new_class(name, (EffFlags, arguments_class), exec_body=lambda body: body.update(namespace))
    return dataclasses.dataclass(init=False, repr=False, eq=False)(made)


if typing.TYPE_CHECKING:

    class EffTrainingArguments(EffFlags, TrainingArguments):
        """`TrainingArguments` with the flags of every technique; `recipe` is what they switch on."""

else:
    EffTrainingArguments = with_eff(TrainingArguments)
