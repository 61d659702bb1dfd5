"""Optimizers whose step moves each element of a parameter by its own gradient alone."""

from __future__ import annotations

import torch

# Exact classes: a subclass may do anything, and what is not known may mix the elements of a gradient, as Muon (its
# singular values), Adafactor (sums of rows and columns), LAMB and LARS (norms) and 8-bit states (scales of blocks) do.
_ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta",
        "ASGD",
    )
)  # fmt: skip


def is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to move each element by its own gradient alone.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> is_element_wise(torch.optim.AdamW([weight])), is_element_wise(torch.optim.Adafactor([weight]))
        (True, False)
    """
    return type(optimizer) in _ELEMENT_WISE
