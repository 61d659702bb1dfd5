"""Statistics that hooks gather in forward or backward, per step and rank first, then summed over all.

`BackwardWatch` hands over each layer's forward value with the gradient of its output, exactly once. `Wanda` needs
inputs only.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distributed.collectives import all_reduce_, world_size
from shared_core.errors import TrainingError
from shared_core.modules.calls import RunHook, remove_hooks
from shared_core.modules.weight_views import channel_axis, check_layout, over_inputs
from shared_core.pruning.scorers.scorer import Scorer, saved_tensors, wide

Call = tuple[Tensor, Tensor]


class _Carry(torch.autograd.Function):
    """Saves a tensor the way layers do, so that activation checkpointing drops and recomputes it. Computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        # An empty tensor with a grad_fn, which is not part of the loss and only holds the saved tensor.
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


class BackwardWatch:
    """Watches layers in training and calls ``take(name, calls)`` once for each layer and backward pass.

    Only forwards in train mode with gradients count. The kept values live in the autograd graph, so a segment under
    activation checkpointing keeps nothing until it is recomputed. The recomputed forward is not counted twice, whether
    its output never gets a gradient (non-reentrant) or is the only one that does (reentrant). Values are released once
    taken. Several calls of one layer before its backward are handed over together. If they have equally many examples,
    they are treated as the same examples.

    Under ``torch.compile`` hooks stay outside the graph (a graph break at each layer, so no ``fullgraph=True``), and
    they must be registered before the first compiled call.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        keep: Callable[[Tensor, Tensor], Tensor],
        take: Callable[[str, list[Call]], None],
        where: str,
    ) -> None:
        self._modules, self._keep, self._take, self._where = modules, keep, take, where
        self._handles: list[RemovableHandle] = []
        self._generation = 0
        self._expected: dict[str, int] = {}
        self._arrived: dict[str, list[Call]] = {}

    def attach(self) -> None:
        """Register the hooks. Safe to call twice."""
        if not self._handles:
            self._handles = [
                module.register_forward_hook(RunHook(self._hook(name)), with_kwargs=True)
                for name, module in self._modules.items()
            ]

    def detach(self) -> None:
        """Remove the hooks. An existing graph then reports nothing."""
        remove_hooks(self._handles)
        self.clear()

    def clear(self) -> None:
        """Forget everything that forwards kept or that arrived but was not taken."""
        # Graphs of an earlier step may still run backward (an error, a probe). Their hooks then do nothing.
        self._generation += 1
        self._expected, self._arrived = {}, {}

    def hand_over(self) -> None:
        """Hand over everything that arrived, as the next forward would."""
        for name in list(self._arrived):
            self._flush(name)

    def flush(self) -> None:
        """Hand over everything that arrived, because the step is complete and no more gradients come."""
        self.hand_over()
        self._expected = {}

    def _hook(self, name: str) -> Callable[..., None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module.training and isinstance(output, Tensor):
                self._seen(name, args[0] if args else next(iter(kwargs.values())), output)

        return hook  # type: ignore[no-any-return]

    def _seen(self, name: str, x: Tensor, output: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # otherwise backward recomputes a forward that was already counted
            if self._arrived.get(name):
                self._flush(name)
            self._expected[name] = self._expected.get(name, 0) + 1
        # A frozen path: this call will never get a gradient.
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        # Without an input that requires a gradient, apply would not create a node.
        anchor = torch.empty(0, requires_grad=True)
        carry: Any = _Carry.apply  # untyped
        # A list, so that the closure can release it. Otherwise the graph would keep the activations alive.
        carriers = [carry(anchor, self._keep(x.detach(), output.detach()))]
        generation = self._generation

        def arrive(gradient: Tensor) -> None:
            if generation != self._generation:
                carriers.clear()
                return
            if not carriers:
                rule = f"each forward of {name} must have only one backward, got a second"
                raise TrainingError(self._where, rule, "add up the losses, or use criterion taylor")
            carrier = carriers.pop()  # torch 2.11 frees what a node saved with its tensor
            (kept,) = carrier.grad_fn.saved_tensors
            self._arrived.setdefault(name, []).append((kept, gradient.detach()))
            # A layer may be called several times in one forward (weight sharing). These calls belong together.
            if len(self._arrived[name]) >= self._expected.get(name, 0):
                self._flush(name)

        hooked: Any = output  # register_hook has no annotations
        hooked.register_hook(arrive)

    def _flush(self, name: str) -> None:
        calls = self._arrived.pop(name, [])
        self._expected.pop(name, None)
        with torch.no_grad():
            # Calls with different batch sizes cannot be stacked by example.
            by_examples: dict[int, list[Call]] = {}
            for kept, gradient in calls:
                by_examples.setdefault(kept.shape[0], []).append((kept, gradient))
            for same in by_examples.values():
                self._take(name, same)


class GatheringScorer(Scorer):
    """Sums one tensor per weight, and counts the terms of the sum.

    `_gather` adds to the window of this rank and step. `observe_step` adds the windows of all ranks to the totals, so
    that after every step all ranks hold the same totals, and any rank's state resumes them all. `reduce` does the same
    for values gathered without steps (calibration).
    """

    def _set_up(self, generator: torch.Generator | None) -> None:
        for name, module in self.modules.items():
            check_layout(module, f"prune {self.criterion}: {name}")
        super()._set_up(generator)

    @property
    def ready(self) -> bool:
        """True if any rank saw any layer."""
        return any(self._counts.values())

    @property
    def num_examples(self) -> dict[str, int]:
        """Number of terms of each weight's sum, on all ranks."""
        return dict(self._counts)

    def discard_step(self) -> None:
        """Forget what the hooks saw since the last `observe_step`."""
        self._window: dict[str, Tensor] = {}
        self._window_counts: dict[str, int] = {}

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the values of all ranks since the last `observe_step`. Every rank must call it."""
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
        """Undo, in place, the factors that scaled this step's loss."""

    @abstractmethod
    def _like(self, name: str) -> Tensor:
        """Return zeros shaped like the values that `_gather` gets for this weight."""

    def _commit(self, loss_scale: float) -> None:
        # Undone before summing over ranks: each has its own loss scale and count.
        for name, window in self._window.items():
            self._rescale_(window, self._window_counts[name], loss_scale)
        counts = torch.tensor([self._window_counts.get(name, 0) for name in self.modules], dtype=torch.int64)
        if world_size() > 1 and self.modules:
            # Counts first: a rank that saw nothing of a layer must add zeros, or the others would wait.
            # On the weights' device, because NCCL does not support CPU tensors.
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
            self._ever.add(name)
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
        """Also return the totals, without those of an unfinished step."""
        totals = {name: total.clone() for name, total in self._totals.items()}
        return {**super().state_dict(), "totals": totals, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the totals."""
        super().load_state_dict(state)
        self._forget()
        shapes = {name: self._like(name).shape for name in state["totals"] if name in self.modules}
        self._totals = saved_tensors(state, "totals", shapes, f"prune {self.criterion}")
        self._counts = {name: int(state["counts"][name]) for name in self._totals}

    def window_state(self) -> dict[str, Any]:
        """Return the sums of the unfinished step, with their counts."""
        sums = {name: window.clone() for name, window in self._window.items()}
        return {"sums": sums, "counts": dict(self._window_counts)} if sums else {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
        shapes = {name: self._like(name).shape for name in state["sums"] if name in self.modules}
        sums = saved_tensors(state, "sums", shapes, f"prune {self.criterion}")
        self._window = {name: total.to(self._like(name).device) for name, total in sums.items()}
        self._window_counts = {name: int(state["counts"][name]) for name in sums}


class BackwardScorer(GatheringScorer):
    """Gathers during the user's backward, from values of each layer's forward and the gradients of its outputs."""

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

    @abstractmethod
    def _keep(self, x: Tensor, output: Tensor) -> Tensor:
        """Return what to keep of a layer's input and output until backward."""

    @abstractmethod
    def _take(self, name: str, calls: list[Call]) -> None:
        """Gather from the kept values and the gradients of the output."""

    def window_state(self) -> dict[str, Any]:
        """Return the sums of the unfinished step, with their counts."""
        self._watch.hand_over()
        return super().window_state()

    def _commit(self, loss_scale: float) -> None:
        self._watch.flush()
        super()._commit(loss_scale)


class Wanda(GatheringScorer):
    """``|w_ij|·‖x_j‖₂``, compared within an output row (Sun et al. 2023, arXiv:2306.11695).

    ``‖x_j‖₂`` covers all inputs: every example, position (including padding), micro-batch and rank, and every position
    of a convolution's input. Forwards in train mode count, with or without gradients. Recomputation by activation
    checkpointing does not count again. Inside `calibrating`, forwards in eval mode count too. Hooks stay outside a
    compiled graph, as in `BackwardWatch`.

    A layer without input since the last update (an expert) uses older statistics. Only weights of one row compete, so
    this does not affect other layers.
    """

    criterion: ClassVar[str] = "wanda"
    needs: ClassVar[frozenset[str]] = frozenset({"activations"})
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
                module.register_forward_pre_hook(RunHook(self._hook(name)), with_kwargs=True)
                for name, module in self.modules.items()
            ]

    def detach(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._handles)
        self.discard_step()

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Count every forward in this block, in train or eval mode, then call `reduce`."""
        attached, self._calibrating = bool(self._handles), True
        self.attach()
        try:
            yield
        finally:
            self._calibrating = False
            if not attached:
                remove_hooks(self._handles)

    def has_seen(self, name: str) -> bool:
        """Return True if any input reached the layer before the last `observe_step` or `reduce`."""
        return name in self._totals or name in self._former

    def reset(self) -> None:
        """Start again, but keep older statistics for layers that get no input."""
        # Older statistics are used for layers without input before the next update (experts, rare branches).
        former, missed = self._former | self._totals, dict(self._missed)
        for name in self.modules if self.ready else ():
            if name not in self._totals:
                missed[name] = missed.get(name, 0) + 1
        super().reset()
        self._former, self._missed = former, missed

    def report(self) -> dict[str, Any]:
        """Return for how many updates a layer had no input. It then used older statistics or kept its mask."""
        return {"updates_without_input": dict(self._missed)} if self._missed else {}

    def state_dict(self) -> dict[str, Any]:
        """Also return the statistics of older updates."""
        former = {name: total.clone() for name, total in self._former.items()}
        return {**super().state_dict(), "former": former, "missed": dict(self._missed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the totals and the older statistics."""
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
            # A forward inside a backward pass is a recomputation.
            if (module.training or self._calibrating) and torch._C._current_graph_task_id() == -1:
                self._see(name, args[0] if args else next(iter(kwargs.values())))

        return hook  # type: ignore[no-any-return]

    @torch.no_grad()
    def _see(self, name: str, x: Tensor) -> None:
        axis = channel_axis(self.modules[name], x)
        # One norm per input channel, over all positions and examples.
        others = [i for i in range(x.dim()) if i != axis]
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Sums of squares of long runs are kept in float64, in which small batches still count.
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
            remedy = "exclude the layer with skip, or calibrate on batches that reach it"
            raise TrainingError("prune wanda", f"{name} got no input", remedy)
        scores = wide(weight).abs()
        return scores.mul_(over_inputs(self.modules[name], total.sqrt().to(scores.dtype), weight.shape))
