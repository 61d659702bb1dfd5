"""`eff report`: the receipt of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Output folder of a run (holds eff_receipt.json).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Show what a run was asked, what it touched, what ran and what it cost."""
    from shared_core.errors import CheckpointError
    from shared_core.receipt import RECEIPT_FILE, Receipt
    from shared_core.strict_json import json_text

    try:
        receipt = Receipt.read(run)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"report: {run / RECEIPT_FILE} must be a receipt, got {error}") from error
    typer.echo(json_text(receipt.values) if as_json else receipt.text())
