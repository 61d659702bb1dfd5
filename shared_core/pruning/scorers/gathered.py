"""Sums that hooks gather in forward or backward: of this step and rank first, then of all steps and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.pruning.scorers.backward_watch import BackwardWatch, Call
from shared_core.pruning.scorers.layouts import check_layout
from shared_core.pruning.scorers.scorer import Scorer, saved_tensors
from shared_core.ranks import all_reduce_, world_size


class GatheringScorer(Scorer):
    """Adds up, for each weight, one tensor and how many things it is a sum over.

    `_gather` adds to the window, which is this rank's and this step's. `observe_step` joins the windows of all ranks
    and adds them to the totals: after every step all ranks hold the same, so that any rank's state resumes them all.
    `reduce` does so for what was gathered without steps (calibration).

    Raises:
        ConfigError: If a layer is neither linear nor convolutional.
    """

    def _set_up(self, generator: torch.Generator | None) -> None:
        for name, module in self.modules.items():
            check_layout(module, f"prune {self.criterion}: {name}")
        super()._set_up(generator)

    @property
    def ready(self) -> bool:
        """Whether any layer was seen, by any rank."""
        return any(self._counts.values())

    @property
    def num_examples(self) -> dict[str, int]:
        """How many things each weight's sum is over, on all ranks."""
        return dict(self._counts)

    def discard_step(self) -> None:
        """Forget what hooks saw since the last `observe_step`."""
        self._window: dict[str, Tensor] = {}
        self._window_counts: dict[str, int] = {}

    @torch.no_grad()
    def reduce(self) -> None:
        """Add what no `observe_step` has taken in yet, of all ranks; every rank must call it."""
        self._commit(1.0)

    def _observe(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], loss_scale: float) -> None:
        self._commit(loss_scale)

    def _gather(self, name: str, values: Tensor, count: int) -> None:
        if name in self._window:
            self._window[name].add_(values)
        else:
            self._window[name] = values
        self._window_counts[name] = self._window_counts.get(name, 0) + count

    def _rescale_(self, window: Tensor, count: int, loss_scale: float) -> None:
        """Undo, in place, what the loss of this step was multiplied and divided by."""

    def _like(self, name: str) -> Tensor:
        """Return zeros as `_gather` gets of this weight."""
        raise NotImplementedError

    def _commit(self, loss_scale: float) -> None:
        for name, window in self._window.items():
            self._rescale_(window, self._window_counts[name], loss_scale)
        counts = torch.tensor([self._window_counts.get(name, 0) for name in self.modules], dtype=torch.int64)
        if world_size() > 1 and self.modules:
            # where the weights are: NCCL takes no tensor of the CPU
            weight: Any = next(iter(self.modules.values())).weight
            counts = all_reduce_(counts.to(weight.device), "sum").cpu()
        for name, count in zip(self.modules, counts.tolist(), strict=True):
            if not count:
                continue
            window = self._window.pop(name) if name in self._window else self._like(name)
            all_reduce_(window, "sum")
            if name in self._totals:
                self._totals[name] = self._totals[name].to(window.device).add_(window)
            else:
                self._totals[name] = window
            self._counts[name] = self._counts.get(name, 0) + count
        self._window, self._window_counts = {}, {}

    def _total(self, name: str, weight: Tensor) -> Tensor | None:
        total = self._totals.get(name)
        if total is not None and total.device != weight.device:
            total = self._totals[name] = total.to(weight.device)
        return total

    def _forget(self) -> None:
        self.discard_step()
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the totals beside what every scorer saves; a step that is not over is not among them."""
        totals = {name: total.clone() for name, total in self._totals.items()}
        return {**super().state_dict(), "totals": totals, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the totals."""
        super().load_state_dict(state)
        self._forget()
        shapes = {name: self._like(name).shape for name in state["totals"] if name in self.modules}
        self._totals = saved_tensors(state, "totals", shapes, f"prune {self.criterion}")
        self._counts = {name: int(state["counts"][name]) for name in self._totals}

    def window_state(self) -> dict[str, Any]:
        """Return the sums of the step that is not over, and what they are sums over."""
        sums = {name: window.clone() for name, window in self._window.items()}
        return {"sums": sums, "counts": dict(self._window_counts)} if sums else {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Take back the sums."""
        shapes = {name: self._like(name).shape for name in state["sums"] if name in self.modules}
        sums = saved_tensors(state, "sums", shapes, f"prune {self.criterion}")
        self._window = {name: total.to(self._like(name).device) for name, total in sums.items()}
        self._window_counts = {name: int(state["counts"][name]) for name in sums}


class BackwardScorer(GatheringScorer):
    """Gathers in the user's own backward, from what layers saw in forward and the gradients of their outputs."""

    def _set_up(self, generator: torch.Generator | None) -> None:
        self._watch = BackwardWatch(self.modules, self._keep, self._take, f"prune {self.criterion}")
        super()._set_up(generator)

    def attach(self) -> None:
        """Register a hook on every layer."""
        self._watch.attach()

    def detach(self) -> None:
        """Remove the hooks."""
        self._watch.detach()
        super().discard_step()

    def discard_step(self) -> None:
        """Forget the examples since the last `observe_step`."""
        self._watch.clear()
        super().discard_step()

    def _keep(self, x: Tensor, output: Tensor) -> Tensor:
        """Return what to hold of a layer's input and output until backward."""
        raise NotImplementedError

    def _take(self, name: str, calls: list[Call]) -> None:
        """Gather from what was held and the gradients of the output."""
        raise NotImplementedError

    def window_state(self) -> dict[str, Any]:
        """Return the sums of the step that is not over, and what they are sums over."""
        self._watch.hand_over()
        return super().window_state()

    def _commit(self, loss_scale: float) -> None:
        self._watch.flush()
        super()._commit(loss_scale)
