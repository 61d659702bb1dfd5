"""An extension of griffe, for what it does not read by itself in this project's sources."""

import ast
import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Examples and formulas are code; options and classes made by a function have their docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Name the section of doctests as griffe knows it, and show formulas as they are written."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r":math:(?=`)", "", text)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Read ``sparsity: float = option(0.5, help="Share of weights")`` as an attribute with default and text.

        The text may be the second argument.
        """
        if str(attr.value).startswith("option("):
            call: Any = ast.parse(str(attr.value), mode="eval").body
            named = [keyword.value for keyword in call.keywords if keyword.arg == "help"]
            text = (named or call.args[1:])[0]
            attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
            attr.value = ast.unparse(call.args[0]) if call.args else None

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a class that only type checkers see the docstring of that which a function of the module makes."""
        if not cls.docstring and cls.parent.is_module:
            classes = (node for node in ast.walk(ast.parse(cls.module.source)) if isinstance(node, ast.ClassDef))
            made = next((text for node in classes if node.name == cls.name and (text := ast.get_docstring(node))), None)
            cls.docstring = griffe.Docstring(made, parent=cls) if made else None
