"""The pages of the API, one per package or module in the navigation, read from its sources."""

import ast
import re
from pathlib import Path

from shared_core.engine.registry import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = re.findall(r"api/([\w.]+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def public_names(module: str) -> list[str]:
    """Return where each public name of a package or module is defined, read from its source.

    A package's names are those that its ``__init__`` imports for others; those of a module, and of the modules of a
    package that imports none, are its own.
    """
    if exported := _exports(module):
        return [_home(source, name) for name, source in exported.items()]
    modules = [module]
    if (folder := _file(module)).name == "__init__.py":
        inside = sorted(path.relative_to(folder.parent).with_suffix("") for path in folder.parent.rglob("*.py"))
        modules = [".".join((module, *path.parts)) for path in inside if not any(part[0] == "_" for part in path.parts)]
    return [f"{home}.{name}" for home in modules for name in _own_names(home)]


def page(package: str) -> str:
    """Return the Markdown of a package's page, for mkdocstrings to fill."""
    tree = ast.parse(_file(package).read_text(encoding="utf-8"))
    lines = [f"# {package}", "", ast.get_docstring(tree) or "", ""]
    for home in public_names(package):
        if home.rpartition(".")[0] in {*PACKAGES} - {package}:  # it stands on that page
            lines += [f"[`{home}`][]", ""]
            continue
        lines += [f"::: {home}", *_options(package, home), ""]
        if key := _technique_of(home):
            config = REGISTRY[key].config_name
            place = _home(REGISTRY[key].package, config)
            lines += [f"Options: those of [`{config}`][{place}]; as flags [`--{key}_…`](../flags.md).", ""]
    return "\n".join(lines)


def _options(package: str, home: str) -> list[str]:
    if package in ("hf_eff", "lightning_eff"):  # what a trainer calls on a callback is no business of who uses it
        return ["    options:", "      members: [recipe, session, receipt]"]
    if package == "eff_kernels":  # whose ops are imported from its modules
        return ["    options:", "      show_root_full_path: true"]
    if home == "shared_core.front_ends.session.Session":  # most of its methods are the engine's
        return ["    options:", "      inherited_members: true"]
    return []


def _technique_of(home: str) -> str | None:
    """Return the key of the technique that a callback switches on."""
    module, _, name = home.rpartition(".")
    keys = {one.technique_name: key for key, one in REGISTRY.items()} if module.endswith("_eff.callbacks") else {}
    return keys.get(name)


def _file(module: str) -> Path:
    path = ROOT / ("kernels" if module.startswith("eff_kernels") else "") / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _statements(module: str) -> list[ast.stmt]:
    return ast.parse(_file(module).read_text(encoding="utf-8")).body


def _exports(module: str) -> dict[str, str]:
    """Return the module that each name is imported from which the module's ``__init__`` passes on."""
    if (file := _file(module)).name != "__init__.py":
        return {}
    if not (stub := file.with_suffix(".pyi")).is_file():
        return {}
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{module}.{node.module}" for node in imports for alias in node.names}


def _home(module: str, name: str) -> str:
    source = _exports(module).get(name)
    return _home(source, name) if source else f"{module}.{name}"


def _own_names(module: str) -> list[str]:
    definitions = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in _statements(module) if isinstance(node, definitions) and node.name[0] != "_"]
