"""Arguments that the commands on a trained model share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="A Hugging Face folder, or module:function that returns the model or (model, inputs).")
]
Out = Annotated[Path, typer.Option(help="The folder to write; it must not exist or be empty.")]
Weights = Annotated[Path | None, typer.Option(help="With module:function, a folder or file with the trained weights.")]
Calibration = Annotated[
    str | None, typer.Option(help="module:function that returns batches: tensors, tuples, dicts or what --loss takes.")
]
Loss = Annotated[
    str | None,
    typer.Option(help="module:function that takes (model, batch) and returns its loss; default: output.loss."),
]
Evaluate = Annotated[
    str | None, typer.Option("--eval", help="module:function that takes a model and returns its quality.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
