"""Checkpoints whose hyperparameters are objects of any class: their tensors and plain values, running none of it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from shared_core.checkpoint_formats.files import NotPlainError, load_torch_file, weights_key
from shared_core.errors import CheckpointError

# No object of a hyperparameter needs these by name, all code does: whoever wrote them wants a reader to run it.
_RUN_CODE = {"os", "posix", "nt", "sys", "subprocess", "runpy", "importlib", "pty", "socket", "ctypes"}
_RUN_CODE_TOO = {"eval", "exec", "compile", "open", "__import__"}
_SCALARS = (str, int, float, bytes, type(None))


class Foreign:
    """Stands for an object of a class that is not read: it takes what the file does to it, and keeps its name alone."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, not read>"


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
    # hooks and whatever else a file would hang on it are left out
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())  # type: ignore[no-untyped-call]


def _tensor_of(storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
    rebuild: Any = torch._utils._rebuild_tensor_v3
    return rebuild(storage, offset, size, stride, False, OrderedDict(), dtype)


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise pickle.UnpicklingError(f"parameter of a {type(data).__name__}")
    return data


class _Admitted:
    """A function that a file may call; nothing in it can be set."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


_ADMITTED = {
    ("torch._utils", "_rebuild_tensor_v2"): _Admitted(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Admitted(_tensor_of),
    ("torch._utils", "_rebuild_parameter"): _Admitted(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Admitted(_parameter),
    ("collections", "OrderedDict"): _Admitted(lambda: OrderedDict()),
}


# The C unpickler cannot have its operations replaced; the Python one keeps them in a table.
_PYTHON: Any = pickle._Unpickler


class _Reader(_PYTHON):  # type: ignore[misc]
    """Python's own unpickler, in Python: of its operations, those that call or set anything are replaced.

    torch's (2.13) cannot read all of these files, whatever `safe_globals` admits: it fills no subclass of dict or list,
    which hyperparameters often are, and hashes any key.

    Names are never imported. What is called is one of five functions here, or a `Foreign`, which gives another. Items
    are put into lists and dicts alone.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PYTHON.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _RUN_CODE or (module in ("builtins", "__builtin__") and name in _RUN_CODE_TOO):
            raise CheckpointError(f"it names {module}.{name}, which runs code and is no value; nothing was run")
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        if (module, name) == ("torch.storage", "UntypedStorage"):  # of new dtypes
            return torch.UntypedStorage
        return _ADMITTED.get((module, name)) or Foreign(f"{module}.{name}")

    def _instantiate(self, function: Any, arguments: Any) -> None:
        # An object of an unknown class becomes a name; only the admitted functions run, with arguments that are
        # values.
        self.append(_called(function, arguments))

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _called(self.stack[-1], arguments)

    def _new_with_names(self) -> None:
        self.stack.pop()
        self._reduce()

    def _build(self) -> None:
        self.stack.pop()  # an ordered dict's attributes, a tensor's: nobody reads them

    def _append(self) -> None:
        item = self.stack.pop()
        _fill(self.stack[-1], [item], pairs=False)

    def _appends(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], items, pairs=False)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill(self.stack[-1], [key, value], pairs=True)

    def _setitems(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], items, pairs=True)

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        _fill(self.stack[-1], items, pairs=True)

    def _empty_set(self) -> None:
        # Sets would call __hash__ of what the file puts into them.
        self.append(Foreign("builtins.set"))

    def _frozen_set(self) -> None:
        self.pop_mark()
        self.append(Foreign("builtins.frozenset"))

    for _operation, _method in (
        # All operations that call something, set attributes, or fill a container: each is one of ours now.
        (pickle.REDUCE, _reduce), (pickle.NEWOBJ, _reduce), (pickle.NEWOBJ_EX, _new_with_names), (pickle.BUILD, _build),
        (pickle.APPEND, _append), (pickle.APPENDS, _appends), (pickle.SETITEM, _setitem), (pickle.SETITEMS, _setitems),
        (pickle.ADDITEMS, _appends), (pickle.EMPTY_SET, _empty_set), (pickle.FROZENSET, _frozen_set),
        (pickle.DICT, _dict),
    ):  # fmt: skip
        dispatch[_operation[0]] = _method
    # objects that other code has registered in this process, and buffers of any size
    for _operation in (
        pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    ):  # fmt: skip
        del dispatch[_operation[0]]


class _Pickle:
    """The module that ``torch.load`` takes in place of pickle."""

    Unpickler = _Reader


def _called(function: Any, arguments: Any) -> Any:
    if isinstance(function, Foreign):
        return Foreign(function.name)
    if not isinstance(function, _Admitted):
        raise pickle.UnpicklingError(f"call of a {type(function).__name__}")
    return function.run(*arguments)


def _fill(target: Any, items: list[Any], *, pairs: bool) -> None:
    # Exact types: a subclass could have a method of its own.
    if type(target) is list and not pairs:
        target.extend(items)
    elif type(target) in (dict, OrderedDict) and pairs:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # the hash of a tuple of tuples of itself takes time without end
            target[key if isinstance(key, _SCALARS) else Foreign(type(key).__name__)] = value
    elif not isinstance(target, Foreign):
        raise pickle.UnpicklingError(f"items for a {type(target).__name__}")


def load_checkpoint(file: Path) -> Any:
    """Return what a file of ``torch.save`` holds, its tensors mapped from the file, running none of its code.

    Where Lightning wrote it, or the weights lie under a key of a dict (``state_dict``, ``model``), a `Foreign` stands
    for each object that is more than tensors and plain values: ``save_hyperparameters`` saves whatever a module is
    built with.

    Raises:
        CheckpointError: If it is missing, damaged, names what runs code, or is another file with such objects.
    """
    # torch's own restricted reader first: most files need nothing else.
    try:
        return load_torch_file(file)
    except NotPlainError as error:
        try:
            content = torch.load(file, "cpu", _Pickle, weights_only=False, mmap=True)  # its own unpickler is ours
        except CheckpointError as hostile:
            raise CheckpointError(file, f"checkpoint must hold only tensors and values, but {hostile}") from None
        except Exception as damage:  # a pickle that is no such checkpoint raises anything
            raise error from damage
        # Only for what trainers write: another pickle with foreign objects is no checkpoint that this must read.
        if isinstance(content, dict) and (
            {"state_dict", "pytorch-lightning_version"} & {*content} or weights_key(content)
        ):
            return content
        raise


def without_foreign(values: Any) -> tuple[Any, list[str]]:
    """Return values without their foreign items, those of a dict each for itself, and what was left out in words.

    Args:
        values: As `load_checkpoint` returns them.

    Returns:
        None for values that are foreign themselves, and the name and class of each that was left out.

    Example:
        >>> without_foreign({"width": 5, "data": Foreign("pathlib.PosixPath")})
        ({'width': 5}, ['data (pathlib.PosixPath)'])
    """
    if not isinstance(values, Mapping):
        return (values, []) if (name := _foreign_in(values)) is None else (None, [name])
    found = {key: name for key, value in values.items() if (name := _foreign_in((key, value))) is not None}
    kept = {key: value for key, value in values.items() if key not in found}
    return kept, [f"{key} ({name})" for key, name in found.items()]


def _foreign_in(values: Any) -> str | None:
    """Return the class of the first foreign object in plain values, which may hold themselves."""
    # With a stack and not by recursion: values may hold themselves, or be nested thousands deep.
    seen: set[int] = set()
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, Foreign):
            return value.name
        if isinstance(value, _Admitted):
            return "a function"
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return None
