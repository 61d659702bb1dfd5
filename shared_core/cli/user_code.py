"""Show errors of the user's own functions in a line: the option that named the function, the error, and its place."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TRACEBACK = "EFF_TRACEBACK"
_OURS = frozenset({"shared_core", "hf_eff", "lightning_eff", "eff_kernels", "__main__"})  # the last: `eff` itself
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_named: dict[CodeType, str] = {}
_folders: set[Path] = set()


def wants_traceback() -> bool:
    """Return whether errors are to come with their traceback."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def remember(function: Callable[..., Any], name: str) -> None:
    """Note a function of the user's, so that `user_error` knows what it raises."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if isinstance(code, CodeType):
        _named[code] = name
        _folders.add(Path(code.co_filename).resolve().parent)


def user_error(error: Exception) -> str | None:
    """Return the line that tells what rose in code of the user's, or None where none of it was running."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_own(frame)]
    if not frames:
        return None
    name = next((_named[frame.f_code] for frame, _ in frames if frame.f_code in _named), "eff: your own code")
    frame, line = frames[-1]
    return f"{name} must run, got {place(error, frame, line)}; {TRACEBACK}=1 shows the whole traceback"


def place(error: Exception, frame: FrameType, line: int) -> str:
    """Return what rose, and where."""
    code = frame.f_code
    return f"{in_short(error)} at {_short(code.co_filename)}:{line} in {code.co_name}"


def in_short(error: Exception) -> str:
    """Return an error's kind and the first line of what it says."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}{f': {first:.300}' if first else ''}"


def broken_module(error: Exception, file: Path | None) -> str:
    """Return why a module of the user's cannot be imported, and at which line."""
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
