"""A model run on example inputs, whatever way it takes them, and in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def call(model: nn.Module, example_inputs: Any) -> Any:
    """Return what the model makes of a tensor, a tuple of arguments or a mapping of keyword arguments.

    A function without arguments is called instead: it may call the model's parts one by one.
    """
    if callable(example_inputs):
        return example_inputs()
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    return model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, without gradients, and back afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
