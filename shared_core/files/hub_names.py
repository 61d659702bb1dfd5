"""Model names: a local folder or file, or a Hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from shared_core.errors import CheckpointError, require
from shared_core.files.user_code import check_function, names_function

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILES = (".ckpt", ".safetensors", ".bin", ".pt", ".pth")


def is_path(name: str) -> bool:
    """Return True if a name can only be a folder or file, not a Hub repository.

    Example:
        >>> is_path("./teacher"), is_path("/runs/a"), is_path("~/a"), is_path("runs/a/b"), is_path("google/bert")
        (True, True, True, True, False)
    """
    folder = name.rpartition("/")[0]
    return not _REPOSITORY.fullmatch(name) or name.endswith(_FILES) or (bool(folder) and Path(folder).is_dir())


def check_named(name: str, where: str, option: str) -> None:
    """Raise an error if a name can only be a path that does not exist, or a function of a module that does not.

    Args:
        name: A path, the name of a repository, or ``module:function``.
        where: Prefix of the error.
        option: Name of the option.
    """
    if names_function(name):
        check_function(name, f"{where}: {option}")
        return
    is_there = not is_path(name) or Path(name).expanduser().exists()
    rule = f"{option} must be an existing folder or file, or a Hub name, but {name!r} does not exist"
    require(is_there, where, rule, "check the path", CheckpointError)
