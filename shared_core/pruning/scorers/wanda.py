"""Wanda: the magnitude of a weight times the norm of the input that it meets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.errors import TrainingError
from shared_core.modules.weight_views import channel_axis, over_inputs
from shared_core.pruning.scorers.capture import GatheringScorer
from shared_core.pruning.scorers.scorer import saved_tensors, wide


class Wanda(GatheringScorer):
    """``|w_ij|·‖x_j‖₂``, compared within an output row (Sun et al. 2023, arXiv:2306.11695).

    ``‖x_j‖₂`` is over all inputs seen: every example and position (padding too), micro-batch and rank, also every
    place of a convolution's input. Forwards in train mode count, with gradients or without (a calibration); what
    activation checkpointing recomputes in backward does not count again. Inside `calibrating` forwards in eval mode
    count too. Hooks stay outside a compiled graph, as in `BackwardWatch`.

    A layer that no input has reached since the last update (an expert) is scored by those before: only weights of one
    row compete, so that it matters to no other that they are older.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> scorer = Wanda({"weight": layer})
        >>> with scorer.calibrating():
        ...     _ = layer(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
        >>> scorer.reduce()
        >>> scorer.scores("weight", torch.tensor([[1.0, -2.0]]))
        tensor([[5., 2.]])
    """

    criterion: ClassVar[str] = "wanda"
    needs: ClassVar[frozenset[str]] = frozenset({"activations"})
    per_row: ClassVar[bool] = True
    _former: dict[str, Tensor]
    _missed: dict[str, int]

    def _set_up(self, generator: torch.Generator | None) -> None:
        self._handles: list[RemovableHandle] = []
        self._calibrating = False
        super()._set_up(generator)

    def attach(self) -> None:
        """Register a hook on every layer."""
        if not self._handles:
            self._handles = [
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
                for name, module in self.modules.items()
            ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.discard_step()

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Count every forward inside, in train or eval mode; then `reduce`. Hooks are there for that long at least."""
        attached, self._calibrating = bool(self._handles), True
        self.attach()
        try:
            yield
        finally:
            self._calibrating = False
            if not attached:
                for handle in self._handles:
                    handle.remove()
                self._handles = []

    def has_seen(self, name: str) -> bool:
        """Return whether an input has ever reached the layer, by the last `observe_step` or `reduce`."""
        return name in self._totals or name in self._former

    def reset(self) -> None:
        """Start again; what was gathered stays for layers that no input will reach."""
        # What is older serves layers that no input reaches before the next update (experts, rare branches).
        former, missed = self._former | self._totals, dict(self._missed)
        for name in self.modules if self.ready else ():
            if name not in self._totals:
                missed[name] = missed.get(name, 0) + 1
        super().reset()
        self._former, self._missed = former, missed

    def report(self) -> dict[str, Any]:
        """Return for how many updates no input had reached a layer: it had its older ones, or kept its mask."""
        return {"updates_without_input": dict(self._missed)} if self._missed else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what older updates gathered beside the totals."""
        former = {name: total.clone() for name, total in self._former.items()}
        return {**super().state_dict(), "former": former, "missed": dict(self._missed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the totals, and what is older."""
        super().load_state_dict(state)
        state = {"former": {}, "missed": {}, **state}  # runs saved before these were kept
        shapes = {name: self._like(name).shape for name in state["former"] if name in self.modules}
        self._former = saved_tensors(state, "former", shapes, f"prune {self.criterion}")
        self._missed = {name: int(count) for name, count in state["missed"].items()}

    def _forget(self) -> None:
        super()._forget()
        self._former, self._missed = {}, {}

    def _hook(self, name: str) -> Callable[..., None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            counts = module is self.modules[name] and (
                module.training or self._calibrating
            )  # not a copy with its hooks
            # the one forward inside a backward pass is a recomputation
            if counts and torch._C._current_graph_task_id() == -1:
                self._see(name, args[0] if args else next(iter(kwargs.values())))

        return hook  # type: ignore[no-any-return]

    @torch.no_grad()
    def _see(self, name: str, x: Tensor) -> None:
        axis = channel_axis(self.modules[name], x)
        # Over all positions and examples: one norm for each input channel.
        others = [i for i in range(x.dim()) if i != axis]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        # sums of squares of long runs are kept in float64, where small batches still count
        norms = torch.linalg.vector_norm(x, dim=others, dtype=dtype) if others else x.abs()
        self._gather(name, norms.double().square(), x.numel() // max(x.shape[axis], 1))

    def _like(self, name: str) -> Tensor:
        module: Any = self.modules[name]
        weight: Tensor = module.weight
        channels = getattr(module, "in_features", None) or getattr(module, "in_channels", None)
        return torch.zeros(int(channels or weight.shape[0]), dtype=torch.float64, device=weight.device)

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        total = self._total(name, weight)
        if total is None and name in self._former:
            total = self._former[name].to(weight.device)
        if total is None:
            raise TrainingError(
                "prune wanda",
                f"{name} must have seen an input, got none",
                "leave the layer out with skip, or calibrate on batches that reach it",
            )
        scores = wide(weight).abs()
        return scores.mul_(over_inputs(self.modules[name], total.sqrt().to(scores.dtype), weight.shape))
