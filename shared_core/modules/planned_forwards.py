"""Layers that transformers' plan of tensor parallelism has cut: their forward follows a change of their class.

transformers (5.23) puts a function on each layer that cuts what goes in, calls the forward that the layer had when it
was loaded, and joins what comes out.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn


class PlannedForward:
    """Stands in for the function that a plan put on a layer: the same around the forward of the layer's present class.

    Without gradients the plan would hand over plain parts of weight and input, of which nothing tells whether a row is
    whole; here both are always tensors that know which part of a whole they are.
    """

    def __init__(self, module: nn.Module, planned: Any, style: Any, mesh: Any) -> None:
        self.planned, self._module, self._style, self._mesh = planned, module, style, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer computes."""
        module, style, mesh, asked = self._module, self._style, self._mesh, torch.is_grad_enabled()
        with torch.enable_grad():  # by which a style tells which tensors to hand over
            args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
            with torch.set_grad_enabled(asked):
                output = type(module).forward(module, *args, **kwargs)
            output = style.transform_output_post_forward(module, output, mesh)
        return output if asked else output.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(copy.deepcopy(self._module, memo), self.planned, self._style, self._mesh)


def follow_class(module: nn.Module) -> bool:
    """Return whether a layer has a plan's forward that follows its class from now on, until `leave_planned`.

    Not where a plan hands over plain parts in training too: those of packed projections and of experts.
    """
    planned = vars(module).get("forward")
    if not inspect.isfunction(planned):
        return False
    inside = inspect.getclosurevars(planned).nonlocals
    style = inside.get("self")
    takes_parts = getattr(style, "should_use_local_tensors", None)
    if takes_parts is None or "original_forward" not in inside:
        return False
    with torch.enable_grad():
        if takes_parts(module):
            return False
    vars(module)["forward"] = PlannedForward(module, planned, style, inside["mesh"])
    return True


def leave_planned(module: nn.Module) -> None:
    """Put the plan's own function back on a layer that has its own class again."""
    found = vars(module).get("forward")
    if isinstance(found, PlannedForward):
        vars(module)["forward"] = found.planned
