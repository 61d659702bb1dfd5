"""Read checkpoints whose hyperparameters are arbitrary objects: only tensors and plain values, without running code."""

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

# Hyperparameters never need these names. A file that has them wants the reader to run code.
_RUN_CODE = {"os", "posix", "nt", "sys", "subprocess", "runpy", "importlib", "pty", "socket", "ctypes"}
_RUN_CODE_TOO = {"eval", "exec", "compile", "open", "__import__"}
_SCALARS = (str, int, float, bytes, type(None))


class Foreign:
    """Placeholder for an object that is not read. It accepts any operation of the file and keeps only the name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, not read>"


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
    # Drop hooks and other attributes from the file.
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())  # type: ignore[no-untyped-call]


def _tensor_of(storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
    rebuild: Any = torch._utils._rebuild_tensor_v3
    return rebuild(storage, offset, size, stride, False, OrderedDict(), dtype)


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise pickle.UnpicklingError(f"parameter of a {type(data).__name__}")
    return data


class _Admitted:
    """A function that a file may call. The file cannot set attributes on it."""

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


# The C unpickler's operations cannot be replaced, but the Python one has them in a table.
_PYTHON: Any = pickle._Unpickler


class _Reader(_PYTHON):  # type: ignore[misc]
    """Python's pure-Python unpickler, with all operations replaced that call or set anything.

    torch's safe unpickler (2.13) cannot read all of these files, even with `safe_globals`: it does not fill subclasses
    of dict or list, which hyperparameters often are, and hashes any key.

    Names are never imported. The file can only call five functions of this module, or a `Foreign`, which returns
    another. Items are only added to lists and dicts.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PYTHON.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _RUN_CODE or (module in ("builtins", "__builtin__") and name in _RUN_CODE_TOO):
            raise CheckpointError(f"it contains {module}.{name}, which runs code; nothing was run")
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        if (module, name) == ("torch.storage", "UntypedStorage"):  # for new dtypes
            return torch.UntypedStorage
        return _ADMITTED.get((module, name)) or Foreign(f"{module}.{name}")

    def _instantiate(self, function: Any, arguments: Any) -> None:
        # An object of an unknown class becomes a name. Only admitted functions run, on plain values.
        self.append(_called(function, arguments))

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _called(self.stack[-1], arguments)

    def _new_with_names(self) -> None:
        self.stack.pop()
        self._reduce()

    def _build(self) -> None:
        self.stack.pop()  # drop attributes

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
        # A set would call __hash__ of its items.
        self.append(Foreign("builtins.set"))

    def _frozen_set(self) -> None:
        self.pop_mark()
        self.append(Foreign("builtins.frozenset"))

    for _operation, _method in (
        # All operations that call something, set attributes, or fill a container.
        (pickle.REDUCE, _reduce), (pickle.NEWOBJ, _reduce), (pickle.NEWOBJ_EX, _new_with_names), (pickle.BUILD, _build),
        (pickle.APPEND, _append), (pickle.APPENDS, _appends), (pickle.SETITEM, _setitem), (pickle.SETITEMS, _setitems),
        (pickle.ADDITEMS, _appends), (pickle.EMPTY_SET, _empty_set), (pickle.FROZENSET, _frozen_set),
        (pickle.DICT, _dict),
    ):  # fmt: skip
        dispatch[_operation[0]] = _method
    # Remove objects registered by other code in this process, and buffers of any size.
    for _operation in (
        pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    ):  # fmt: skip
        del dispatch[_operation[0]]


class _Pickle:
    """The module that ``torch.load`` uses instead of pickle."""

    Unpickler = _Reader


def _called(function: Any, arguments: Any) -> Any:
    if isinstance(function, Foreign):
        return Foreign(function.name)
    if not isinstance(function, _Admitted):
        raise pickle.UnpicklingError(f"call of a {type(function).__name__}")
    return function.run(*arguments)


def _fill(target: Any, items: list[Any], *, pairs: bool) -> None:
    # Exact types: a subclass could have its own methods.
    if type(target) is list and not pairs:
        target.extend(items)
    elif type(target) in (dict, OrderedDict) and pairs:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only scalar keys: hashing deeply shared tuples takes exponential time.
            target[key if isinstance(key, _SCALARS) else Foreign(type(key).__name__)] = value
    elif not isinstance(target, Foreign):
        raise pickle.UnpicklingError(f"items for a {type(target).__name__}")


def load_checkpoint(file: Path) -> Any:
    """Return the content of a ``torch.save`` file with memory-mapped tensors, without running its code.

    In Lightning checkpoints and dicts with weights under a key (``state_dict``, ``model``), each object that is not a
    tensor or plain value becomes a `Foreign`: ``save_hyperparameters`` saves any constructor argument.

    Raises:
        CheckpointError: If the file is missing, damaged, would run code, or is another kind of file with objects.
    """
    # Try torch's restricted reader first, which suffices for most files.
    try:
        return load_torch_file(file)
    except NotPlainError as error:
        try:
            content = torch.load(file, "cpu", _Pickle, weights_only=False, mmap=True)  # uses our unpickler
        except CheckpointError as hostile:
            raise CheckpointError(file, f"checkpoint must hold only tensors and values, but {hostile}") from None
        except Exception as damage:  # any other pickle may raise anything
            raise error from damage
        # Only for checkpoints that trainers write, not for any pickle with objects.
        if isinstance(content, dict) and (
            {"state_dict", "pytorch-lightning_version"} & {*content} or weights_key(content)
        ):
            return content
        raise


def without_foreign(values: Any) -> tuple[Any, list[str]]:
    """Return values without foreign objects, and a description of what was removed. Dict items are checked one by one.

    Args:
        values: A result of `load_checkpoint`.

    Returns:
        The values, None if they are foreign themselves, and the name and class of each removed item.

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
    """Return the class of the first foreign object in plain values."""
    # A stack instead of recursion: values may contain themselves, or be nested thousands deep.
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
