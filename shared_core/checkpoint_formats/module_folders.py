"""Folders of several modules, as sentence-transformers saves a model: ``modules.json`` names a folder for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from shared_core.checkpoint_formats.files import read_json
from shared_core.errors import CheckpointError
from shared_core.files.json_yaml import parse_json

MODULES = "modules.json"
_ROUTER = "router_config.json"
_MOST_NESTED = 8


class Part(NamedTuple):
    """A module of a model."""

    folder: str
    """Where its files lie below the model's folder, ``""`` if right in it."""
    module: str
    """Its name in the model."""
    inner: str
    """Its name for the model inside that these files are of, ``""`` if they are its own."""

    @property
    def prefix(self) -> str:
        """Prefix of names in the model's state dict before those in its files."""
        return "".join(f"{name}." for name in (self.module, self.inner) if name)


def parts_of(folder: Path) -> list[Part]:
    """Return the modules in a folder, with those that a module routes to; without ``modules.json`` the folder itself.

    Raises:
        CheckpointError: If what the folder says of its modules is damaged, or leads out of it.
    """
    file = folder / MODULES
    if not file.is_file():
        return [Part("", "", "")]
    try:
        listed = parse_json(file.read_text(encoding="utf-8"))
        named = [(entry["path"], entry["name"], entry["type"]) for entry in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            file, f"file must list modules with path, name and type, got {error!r:.200}", "it is damaged"
        ) from error
    return [part for entry in named for part in _part(folder, "", *entry, file)]


def _part(root: Path, above: str, path: Any, name: Any, kind: Any, file: Path) -> list[Part]:
    # Lengths are bounded, since names go into error messages and file systems.
    if not all(isinstance(value, str) and len(value.encode(errors="replace")) < 256 for value in (path, name, kind)):
        raise CheckpointError(file, f"module must have a name and a path, got {name!r:.100} and {path!r:.100}")
    # A path in a file that is not trusted: one folder name, nothing that leads elsewhere.
    if path and (Path(path).name != path or path in (".", "..") or "\0" in path):
        raise CheckpointError(file, f"module must lie in a folder beside it, got {path!r:.100}", "it is damaged")
    folder = f"{above}{path}"
    if not (root / folder).is_dir():
        raise CheckpointError(file, f"module {name!r} must lie in {folder!r:.100}, got no such folder", "it is damaged")
    if (root / folder / _ROUTER).is_file():
        return _routes(root, folder, name)
    # transformers' model in it is called `auto_model` by versions before 6
    wraps = kind.rpartition(".")[2] == "Transformer"
    inner = "" if not wraps else "model" if kind.startswith("sentence_transformers.base.") else "auto_model"
    return [Part(folder, name, inner)]


def _routes(root: Path, folder: str, name: str) -> list[Part]:
    """Return the modules that a router sends its inputs to, each once."""
    file = root / folder / _ROUTER
    if folder.count("/") > _MOST_NESTED:
        raise CheckpointError(file, "router must not be nested so deeply", "it is damaged")
    config = read_json(file)
    kinds, structure = config.get("types"), config.get("structure")
    if not isinstance(kinds, dict) or not isinstance(structure, dict):
        raise CheckpointError(file, "router must have types and structure, got none", "it is damaged")
    found: dict[str, Part] = {}
    for route, names in structure.items():
        for number, path in enumerate(names if isinstance(names, list) else [names]):
            if not isinstance(path, str):
                raise CheckpointError(file, f"router must name the folders of its modules, got {path!r:.100}")
            # A module that several routes share is there once.
            if path not in found:
                above, module = f"{folder}/" if folder else "", f"{name}.sub_modules.{route}.{number}"
                found |= {part.folder.removeprefix(above): part
                          for part in _part(root, above, path, module, kinds.get(path), file)}  # fmt: skip
    return list(found.values())
