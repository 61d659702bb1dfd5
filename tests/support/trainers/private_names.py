"""Where a trainer's library uses a private name, and which ones a front end touches."""

import ast
import inspect
import textwrap
from pathlib import Path


def names_in(function):
    """Return the attributes and functions that a function or property names."""
    function = getattr(function, "fget", function)
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def sources(package):
    """Return the parsed files of a front end without its table."""
    files = [file for file in Path(package.__file__).parent.rglob("*.py") if file.name != "_private_names.py"]
    return {file.name: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()
