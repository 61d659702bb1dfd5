"""Functions that the user names as ``module:function`` or ``file.py:function``, and errors in their code."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from shared_core.errors import ConfigError, EffError, in_short, nearest, require


def function(name: str, where: str, *arguments: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` or ``file.py:function`` names, if it takes arguments of these names.

    Modules of the working folder can be imported.
    """
    check_function(name, where)
    module_name, _, function_name = name.rpartition(":")
    try:
        module = user_module(module_name)
    except Exception as error:  # importing a module may raise anything
        if isinstance(error, ImportError):
            why = f"{error}; check the name, and run where it can be imported"
        elif isinstance(error, EffError):
            raise
        else:
            why = f"{broken_module(error, _file_of(module_name))}; fix it"
        raise ConfigError(f"{where} must name an importable module, got {name!r}: {why}") from error
    found: Any = getattr(module, function_name, None)
    own = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    hint = "" if callable(found) else nearest(function_name, own)
    require(callable(found), f"{where} must name a function of {module_name}, got {function_name!r}{hint}", "")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        called = f"that takes ({', '.join(arguments)})" if arguments else "without arguments"
        raise ConfigError(
            f"{where} must name a function {called}, got {name}: {error}; write one that calls it"
        ) from error
    except ValueError:
        pass  # functions in C don't report their arguments
    remember(found, f"{where} {name}")
    return found  # type: ignore[no-any-return]


def names_function(name: str) -> bool:
    """Return True if a name that may also be a path or a Hub name has the form ``module:function``.

    Example:
        >>> names_function("my_pkg.teachers:build"), names_function("C:/runs/a"), names_function("google/bert")
        (True, False, False)
    """
    module, colon, function_name = name.rpartition(":")
    return bool(module and colon) and function_name.isidentifier() and not Path(name).expanduser().exists()


def user_module(name: str) -> ModuleType:
    """Return a user's module by name or file. Modules beside it can be imported too."""
    is_file = name.endswith(".py")
    if (beside := str(Path(name).resolve().parent if is_file else Path.cwd())) not in sys.path:
        sys.path.insert(0, beside)
    if not is_file:
        return importlib.import_module(name)
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise ModuleNotFoundError(f"there is no file {name}")
    # under its own name if that is free, so that there is only one copy of the module
    if file.stem.isidentifier() and _file_of(file.stem) == file:
        return importlib.import_module(file.stem)
    alone = re.sub(r"\W", "_", str(file))
    if alone not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(alone, file)
        sys.modules[alone] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[alone]
            raise
    return sys.modules[alone]


def _file_of(name: str) -> Path | None:
    """Return the file of a module, by its name or path; None if it has none."""
    if name.endswith(".py"):
        return Path(name).resolve()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a spec
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def check_function(name: str, where: str) -> None:
    """Raise an error if a name is not ``module:function``, or the module does not exist. Nothing is imported."""
    module, colon, function_name = name.rpartition(":")
    rule = f"{where} must be module:function or file.py:function, got {name!r}"
    require(module and colon and function_name, rule, "", "my_module.py:build names build of that file")
    rule = f"{where} must name an importable module, got {name!r}"
    if module.endswith(".py"):
        is_there = Path(module).expanduser().is_file()
        require(is_there, f"{rule}: there is no file {module}", "", "check the path")
        return
    remedy = "check the name, and run where it can be imported"
    require(is_module(module), f"{rule}: there is no module {module.partition('.')[0] or module}", "", remedy)


def is_module(name: str) -> bool:
    """Return True if a module's package can be imported here. What it contains shows only when it is imported."""
    package = name.partition(".")[0]
    if not package or package in sys.modules:
        return bool(package)
    here = importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd())])
    return bool(here or importlib.util.find_spec(package))


TRACEBACK = "EFF_TRACEBACK"
_OURS = frozenset({"shared_core", "hf_eff", "lightning_eff", "eff_kernels", "__main__"})  # the last: `eff` itself
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_named: dict[CodeType, str] = {}
_folders: set[Path] = set()


def wants_traceback() -> bool:
    """Return True if errors should be shown with their traceback."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def remember(function: Callable[..., Any], name: str) -> None:
    """Register a user's function, so that `user_error` recognizes errors in it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if isinstance(code, CodeType):
        _named[code] = name
        _folders.add(Path(code.co_filename).resolve().parent)


def user_error(error: Exception) -> str | None:
    """Return a line about an error in the user's code, or None if the error is elsewhere."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_own(frame)]
    if not frames:
        return None
    name = next((_named[frame.f_code] for frame, _ in frames if frame.f_code in _named), "eff: your own code")
    frame, line = frames[-1]
    return f"{name} failed: {place(error, frame, line)}; {TRACEBACK}=1 shows the whole traceback"


def place(error: Exception, frame: FrameType, line: int) -> str:
    """Return an error and its location."""
    code = frame.f_code
    return f"{in_short(error)} at {_short(code.co_filename)}:{line} in {code.co_name}"


def broken_module(error: Exception, file: Path | None) -> str:
    """Return why a user's module cannot be imported, and the line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} at {_short(error.filename)}:{error.lineno}"
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [found for found in frames if file is not None and Path(found[0].f_code.co_filename) == file]
    return place(error, *own[-1]) if own else in_short(error)


def _is_own(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        return False
    if frame.f_code in _named:
        return True
    file = Path(frame.f_code.co_filename)
    for folder in _folders:
        if file.is_absolute() and file.is_relative_to(folder):
            inner = file.relative_to(folder).parts
            return not any(part in _INSTALLED or part.startswith((".", "python3")) for part in inner)
    return False


def _short(file: str) -> str:
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file
