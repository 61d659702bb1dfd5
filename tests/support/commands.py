"""`eff` in the process of the test."""

import json
import sys

from typer.testing import CliRunner

from shared_core.cli import app


def eff(*words, **options):
    """Run a command line and return its result; raise the error that it ends with."""
    result = CliRunner().invoke(app, [*map(str, words)], **options)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def user_module(folder, monkeypatch, name, text):
    """Work in a folder that holds a module of the user's, which nobody has imported yet."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / f"{name}.py").write_text(text)


def told_by(command, *words, **options):
    """Return what a command that ends well prints as JSON."""
    result = eff(command, "--json", *words, **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
