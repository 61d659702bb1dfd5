"""`eff` in the process of the test."""

import json

from typer.testing import CliRunner

from shared_core.cli import app


def eff(*words, **options):
    """Run a command line and return its result; raise the error that it ends with."""
    result = CliRunner().invoke(app, [*map(str, words)], **options)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def told_by(command, *words, **options):
    """Return what a command that ends well prints as JSON."""
    result = eff(command, "--json", *words, **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
