"""A count of flushed activation gradients that owes nothing to the code that it checks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recount:
    """Counts flushed activation gradients anew, by a float64 backward written out by hand.

    It starts from the fp32 gradient of the model's output, as the probe does, and takes ReLU's decisions from the fp16
    forward that was trained on.
    """

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self._grads: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._handles = [
            module.register_forward_hook(lambda _, __, output, index=index: self._note(index, output))
            for index, module in enumerate(model)
            if index
        ]

    def _note(self, index: int, output: Tensor) -> None:
        self._outputs[index] = output.detach()
        output.register_hook(lambda grad: self._grads.__setitem__(index, grad.clone()))

    def note_output(self, output: Tensor) -> None:
        """End of the forward: take no part in the probe's second one."""
        for handle in self._handles:
            handle.remove()
        output.register_hook(lambda grad: self._grads.__setitem__(-1, grad.clone()))

    def counts(self) -> tuple[int, int]:
        """Return how many activation gradients arrived as zero but are not, and how many are not zero."""
        lost = seen = 0
        exact = self._grads[-1].double()
        for index in reversed(range(1, len(self._model))):
            lost += int(((self._grads[index] == 0) & (exact != 0)).sum())
            seen += int(torch.count_nonzero(exact))
            module = self._model[index]
            if isinstance(module, nn.Linear):
                exact = exact @ module.weight.detach().double()
            else:
                exact = exact * (self._outputs[index] > 0)
        return lost, seen
