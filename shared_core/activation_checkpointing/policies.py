"""Find a model's blocks, and the segments of them that a named policy or a memory budget checkpoints.

A budget is planned from a profile of example inputs or of the first micro-batches in training.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.activation_checkpointing.budget_planner import BlockCost, SegmentPlan, StepCost
from shared_core.activation_checkpointing.config import CheckpointingConfig, parse_budget
from shared_core.activation_checkpointing.profiler import PeakBytes, StepProfile, device_of, measure_peak
from shared_core.activation_checkpointing.segments import Handle, apply_segments, selective_contexts
from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import ConfigError, MatchError, TrainingError, nearest
from shared_core.modules.calls import buffers_restored, call, loss_of, modes_restored
from shared_core.modules.matching import own_class, plain_name

_Group = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks, in forward order as far as modules show it.

    Blocks are children of one class in a ``ModuleList`` or ``Sequential`` that consist of several modules: layers of a
    transformer, or residual blocks in each stage of a CNN. If a list holds stages (of different shapes, with blocks
    inside), the blocks inside are returned. Without such lists, these are attributes of one class, or else the parts of
    the longest plain ``Sequential``.

    Args:
        model: Any module.

    Returns:
        Names as in ``named_modules()``, without the parts that wrappers insert.

    Raises:
        MatchError: If no blocks repeat.

    Example:
        >>> def block():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> find_blocks(nn.Sequential(nn.Linear(2, 4), nn.Sequential(block(), block(), block())))
        ['1.0', '1.1', '1.2']
    """
    groups = list(_groups(model, "", in_lists=True))
    # Compare original classes, since another technique may have swapped them (`own_class` returns the original).
    kinds = [own_class(group[0][1]) for group in groups]
    repeated = [g for g, kind in zip(groups, kinds, strict=True) if len(g) > 1 or kinds.count(kind) > 1]
    classes = {own_class(group[0][1]) for group in repeated} - {nn.Sequential}  # a list of Sequentials is one itself
    found = list(_repeated(model, "", {name for group in repeated for name, _ in group}, classes))
    found = found or [name for group in groups for name, _ in group]  # one layer, called many times
    found = found or [name for group in _groups(model, "", in_lists=False) for name, _ in group]
    if not found:
        plain = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential)]
        longest = max(plain, key=lambda named: len(named[1]), default=("", nn.Sequential()))
        prefix = f"{longest[0]}." if longest[0] else ""
        found = [prefix + name for name, _ in longest[1].named_children()] if len(longest[1]) > 3 else []
    if not found:
        raise MatchError(
            "checkpointing",
            f"{type(model).__name__} has no repeated blocks (a list of modules of one class)",
            "name the modules to recompute in include, or pass their names to apply_segments",
        )
    return [plain_name(name) for name in found]


def _groups(module: nn.Module, prefix: str, *, in_lists: bool, in_stage: bool = False) -> Iterator[_Group]:
    """Yield the outermost groups of blocks: children of a list, or of any module, that share a class."""
    # Stages are not nested: modules of different shapes inside a stage are blocks, even if they hold lists.
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    compound = [(name, child) for name, child in children if _is_compound(child)]
    by_class: dict[type[nn.Module], _Group] = {}
    for name, child in compound:
        by_class.setdefault(own_class(child), []).append((name, child))
    taken: set[str] = set()
    stages: set[str] = set()
    for group in by_class.values():
        # In lists: all compound children of one class. Elsewhere: several siblings of one class.
        if is_list and len(by_class) == 1 if in_lists else len(group) > 1:
            if in_stage or not _are_stages(group):
                taken |= {name for name, _ in group}
                yield group
            elif len(group) > 1:
                stages |= {name for name, _ in group}
    for name, child in children:
        if name not in taken:
            yield from _groups(child, f"{name}.", in_lists=in_lists, in_stage=in_stage or name in stages)


def _repeated(module: nn.Module, prefix: str, names: set[str], classes: set[type[nn.Module]]) -> Iterator[str]:
    """Yield the outermost named blocks, and blocks of their classes that are alone in a list (a stage of one)."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        if f"{prefix}{name}" in names or (is_list and own_class(child) in classes):
            yield f"{prefix}{name}"
        else:
            yield from _repeated(child, f"{prefix}{name}.", names, classes)


def _is_compound(module: nn.Module) -> bool:
    """Return True if a module consists of several modules and has a forward."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not is_list and next(module.parameters(), None) is not None and next(module.children(), None) is not None


def _are_stages(group: _Group) -> bool:
    """Return True if modules contain the blocks: they all differ in shape and hold lists of blocks."""
    # Stages of a CNN all differ in shape and hold lists of blocks; modules of equal shape are blocks themselves.
    shapes = [tuple((n, tuple(p.shape)) for n, p in module.named_parameters()) for _, module in group]
    if len(set(shapes)) < len(shapes):
        return False
    return any(next(_groups(module, "", in_lists=True), None) is not None for _, module in group)


PROFILED_STEPS = 2  # the first step of a process is slow: it selects kernels and allocates memory


def plan_segments(model: nn.Module, budget: str, *profiled: Any, **options: Any) -> SegmentPlan:
    """Return the segments to checkpoint within a budget, using `profile_blocks`."""
    parsed = parse_budget(budget)
    return parsed.plan(profile_blocks(model, *profiled, **options))


def profile_blocks(
    model: nn.Module,
    example_inputs: Any = None,
    step: Callable[[], object] | None = None,
    names: Sequence[str] | None = None,
) -> StepCost:
    """Return the cost of a model's blocks in a training step. Runs two steps that leave the model unchanged.

    `example_inputs` are a tensor, a sequence or mapping of arguments, or ``(args, kwargs)``. The loss is the one that
    the model returns, or the sum of its outputs. Alternatively, `step` runs one forward and backward of the model.
    """
    if (example_inputs is None) == (step is None):
        raise ConfigError(
            "checkpointing",
            f"a budget needs either example_inputs or a step to profile, got {'neither' if step is None else 'both'}",
            "pass the arguments of the model's forward as example_inputs",
        )
    profile = StepProfile(model, find_blocks(model) if names is None else names)
    with _without_trace(model):
        for _ in range(PROFILED_STEPS):
            model.zero_grad()
            profile.start()
            try:
                step() if step is not None else _loss(model, example_inputs).backward()  # type: ignore[no-untyped-call]
                profile.stop()
            finally:
                profile.cancel()
    return profile.cost()


def _loss(model: nn.Module, inputs: Any) -> Tensor:
    match inputs:
        case [tuple() as args, dict() as kwargs]:
            output = model(*args, **kwargs)
        case _:
            output = call(model, inputs)
    if isinstance(loss := loss_of(output), Tensor):
        return loss
    # A model without a loss is profiled on the sum of its outputs: only memory and time matter.
    values = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not values:
        raise TrainingError(
            "checkpointing",
            f"{type(model).__name__} returned no tensor with a gradient",
            "make some of its parameters trainable, or pass a step instead of inputs",
        )
    return torch.stack(values).sum()


@contextlib.contextmanager
def _without_trace(model: nn.Module) -> Iterator[None]:
    # Profiling runs real steps, so gradients, buffers, modes and random state are restored.
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    try:
        with modes_restored(model), buffers_restored(model), torch.random.fork_rng(devices):
            if not model.training:  # from_pretrained returns models in eval mode
                model.train()
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


_COLUMNS = {"input": int, "saved": int, "inner": int, "seconds": float, "tail": float}


class LazyBudget:
    """Profiles the first two micro-batches, plans and applies segments, then measures the next micro-batch.

    Call `before_forward` and `after_backward` around each micro-batch, or `after_backward` once per accumulation
    window: then its last micro-batch counts. All processes use the largest bytes and times of any process, so they
    choose the same plan. A resumed run applies the saved plan at once if budget and blocks are the same.
    """

    def __init__(
        self, model: nn.Module, budget: str, names: Sequence[str], apply: Callable[[Sequence[Sequence[str]]], object]
    ) -> None:
        self._model, self._budget, self._apply = model, parse_budget(budget), apply
        self._asked = {"budget": budget, "names": list(names)}
        self._profile = StepProfile(model, names)
        self._measuring: tuple[ExitStack, PeakBytes] | None = None
        self._looking = False
        self.plan: SegmentPlan | None = None
        """The chosen plan, None until then."""
        self.measured_peak: int | None = None
        """Peak bytes of activations of a micro-batch under the plan on any process, None until measured."""

    @property
    def is_done(self) -> bool:
        """True if planning and measuring are finished, so that no further calls are needed."""
        return self.measured_peak is not None

    @property
    def remark(self) -> str | None:
        """A note about the measured peak, or None."""
        if self.plan is None or self.measured_peak is None:
            return None
        if not self.plan.segments:
            return f"nothing is recomputed: the peak of {_mib(self.plan.peak)} is within {self._asked['budget']}"
        bound = self._budget.num_bytes(self.plan.full_peak)
        if bound is None or self.measured_peak <= bound:
            return None
        return (
            f"the measured peak of {_mib(self.measured_peak)} exceeds {self._asked['budget']}, {_mib(bound)}, where "
            f"{_mib(self.plan.peak)} were predicted; use a lower budget if memory is short"
        )

    def before_forward(self) -> None:
        """Start a training micro-batch; forget an earlier one without backward."""
        self.cancel()
        if self.is_done:
            return
        self._looking = True
        if self.plan is None:
            self._profile.start()
        else:
            stack = ExitStack()
            self._measuring = stack, stack.enter_context(measure_peak(self._model))

    def cancel(self) -> None:
        """Forget the current micro-batch, if any, because it failed or was not for training."""
        self._looking = False
        self._profile.cancel()
        if self._measuring is not None:
            self._measuring[0].close()
            self._measuring = None

    def after_backward(self) -> None:
        """End a micro-batch after its backward. All processes must call it equally often."""
        if not self._looking:
            return
        self._looking = False
        if self._measuring is not None:
            stack, peak = self._measuring
            self._measuring = None
            stack.close()
            # The slowest or largest process decides, because DDP and FSDP2 need the same plan everywhere.
            most = all_reduce_(torch.tensor(peak.activations, device=device_of(self._model)), "max")
            self.measured_peak = int(most.item()) or None  # no activations: the script skipped this micro-batch
            return
        self._profile.stop()
        if self._profile.num_steps == PROFILED_STEPS:
            self.plan = self._budget.plan(_most_of_all_processes(self._profile.cost(), device_of(self._model)))
            self._apply(self.plan.segments)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the measurements as plain values; empty before there is a plan."""
        if self.plan is None:
            return {}
        plan = asdict(self.plan) | {"segments": [list(segment) for segment in self.plan.segments]}
        return {"plan": plan, "asked": self._asked} | (
            {} if self.measured_peak is None else {"measured_peak": self.measured_peak}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Apply the saved plan if it fits this budget and these blocks, and none is applied yet."""
        if self.plan is None and "plan" in state and state.get("asked") == self._asked:
            segments = tuple(tuple(segment) for segment in state["plan"]["segments"])
            self.plan = SegmentPlan(**{**state["plan"], "segments": segments})
            self.measured_peak = state.get("measured_peak")
            self._apply(segments)

    def report(self) -> dict[str, Any]:
        """Return predicted and measured peak in bytes and the recomputation time, for the receipt."""
        if self.plan is None:
            return {"planned": False}
        return {
            "planned": True,
            "plan": [list(segment) for segment in self.plan.segments],
            "predicted_peak_bytes": self.plan.peak,
            "measured_peak_bytes": self.measured_peak,
            "peak_bytes_without": self.plan.full_peak,
            "least_peak_bytes": self.plan.least_peak,
            "recomputed_share_of_forward": self.plan.share,
        }


def _most_of_all_processes(cost: StepCost, device: torch.device) -> StepCost:
    """Return the maximum of each figure over all processes. Every process must call it."""
    # `not follows` as 0 or 1, so the maximum means "broken on any process".
    rows = [[*(float(getattr(block, name)) for name in _COLUMNS), float(not block.follows)] for block in cost.blocks]
    figures = torch.tensor([[cost.head] + [0] * len(_COLUMNS), *rows], dtype=torch.float64)
    (head, *_), *rows = all_reduce_(figures.to(device), "max").tolist()
    blocks = []
    for block, (*most, breaks) in zip(cost.blocks, rows, strict=True):
        found: dict[str, Any] = {name: kind(value) for (name, kind), value in zip(_COLUMNS.items(), most, strict=True)}
        blocks.append(BlockCost(name=block.name, **found, follows=not breaks))
    return StepCost(blocks=tuple(blocks), head=int(head))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def apply_policy(
    model: nn.Module, policy: str, example_inputs: Any = None, *, k: int = 2, include: Iterable[str] = ()
) -> Handle:
    """Make a model recompute activations in backward by a named policy; return a handle to undo it.

    Gradients stay bit-equal; see `apply_segments`. Call it before ``fully_shard``, DDP and ``torch.compile``. With N
    blocks:

    - ``block``: recompute each block from its input.
    - ``sublayer``: only each block's attention, whose memory grows fastest, or its largest part if it has none.
    - ``sqrt``: recompute √N segments of consecutive blocks from their inputs (Chen et al. 2016, arXiv:1604.06174).
    - ``stage``: one segment per resolution of a CNN, which begins at the block that down-samples.
    - ``every_k``: every k-th block including the first, like ``every_n_layers`` of transformers.
    - ``selective``: each block, but outputs of matrix products are kept (Korthikanti et al. 2022, arXiv:2205.05198).
    - ``budget:...``: planned from a profile of one step on `example_inputs`; see `parse_budget`.

    Args:
        model: Changed in place: its blocks get a new forward. Parameters, buffers and classes do not change.
        policy: A name in `POLICIES`, or ``budget:...``.
        example_inputs: One micro-batch, ``(args, kwargs)``; only for a budget.
        k: For ``every_k``, at least 1.
        include: Names or classes of the blocks, with wildcards, instead of those from `find_blocks`. Of nested modules
            the outermost are used.

    Returns:
        A handle with the wrapped blocks, counts of what ran, and ``remove()``.

    Raises:
        ConfigError: If the policy does not exist, or a budget has no example.
        MatchError: If no block matches.
        CompatibilityError: If the model is already checkpointed.

    Example:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9)))
        >>> handle = apply_policy(net, "sqrt")
        >>> handle.segments
        (('0', '1', '2'), ('3', '4', '5'), ('6', '7', '8'))
        >>> handle.remove()
        >>> apply_policy(net, "every_k", k=4).names
        ['0', '4', '8']
    """
    config = CheckpointingConfig(policy=policy)
    blocks = chosen_blocks(model, include)
    if config.has_budget:
        return apply_segments(model, plan_segments(model, policy, example_inputs, names=blocks).segments)
    contexts = selective_contexts if policy == "selective" else None
    return apply_segments(model, _segments(model, policy, blocks, k), contexts=contexts)


def chosen_blocks(model: nn.Module, include: Iterable[str] = ()) -> list[str]:
    """Return the names of the blocks matching `include`, or those from `find_blocks`."""
    return _included(model, tuple(include)) if include else find_blocks(model)


def _segments(model: nn.Module, policy: str, blocks: Sequence[str], k: int) -> list[list[str]]:
    if policy == "sqrt":
        # n inputs become √n, plus one segment's activations (Chen et al. 2016, arXiv:1604.06174).
        number = round(math.sqrt(len(blocks)))
        edges = [round(place * len(blocks) / number) for place in range(number + 1)]
        return [list(blocks[low:high]) for low, high in itertools.pairwise(edges)]
    if policy == "stage":
        return _stages(model, blocks)
    if policy == "sublayer":
        modules = {plain_name(name): module for name, module in model.named_modules()}
        return [[name] for block in blocks for name in _sublayers(block, modules[block])]
    return [[name] for name in blocks[:: k if policy == "every_k" else 1]]


def _sublayers(name: str, block: nn.Module) -> list[str]:
    """Return the outermost attention layers of a block, or else its part with the most parameters."""
    found: list[str] = []
    for part, module in block.named_modules():
        is_attention = part and "attention" in type(module).__name__.lower().replace("attn", "attention")
        if is_attention and not any(part.startswith(f"{outer}.") for outer in found):
            found.append(part)
    sizes = {
        part: sum(parameter.numel() for parameter in child.parameters())
        for part, child in block.named_children()
        if _runs(child) and next(child.children(), None) is not None
    }
    if not found and not any(sizes.values()):
        raise MatchError(
            "checkpointing",
            f"sublayer: {name} has no attention and no other part made of several modules",
            "use policy block",
        )
    return [f"{name}.{part}" for part in found or [max(sizes, key=sizes.__getitem__)]]


def _runs(module: nn.Module) -> bool:
    """Return True if a module has a forward. Lists and dicts of modules (also LoRA's) have none."""
    # Looked up statically, because a scripted module's class computes its attributes.
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _stages(model: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Return the blocks grouped by resolution. A new list in the model, or a stride, starts a new group."""
    segments: list[list[str]] = []
    for name in blocks:
        # Activation sizes change with the resolution; a segment of one size keeps only its first input.
        is_next = not segments or segments[-1][-1].rpartition(".")[0] != name.rpartition(".")[0]
        if is_next or _down_samples(model.get_submodule(name)):
            segments.append([])
        segments[-1].append(name)
    if len(segments) == 1:
        raise MatchError(
            "checkpointing",
            "stage: the resolution never changes between blocks, so all of them are one stage",
            "use policy sqrt",
        )
    return segments


def _down_samples(block: nn.Module) -> bool:
    strides = (
        getattr(module, "stride", 1)
        for module in block.modules()
        if not isinstance(module, nn.modules.conv._ConvTransposeNd)
    )
    return any(max(stride) > 1 if isinstance(stride, tuple) else stride not in (None, 1) for stride in strides)


def _included(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    modules = {plain_name(name): module for name, module in model.named_modules() if name}

    def hits(name: str, pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or own_class(modules[name]).__name__ == pattern

    for pattern in patterns:
        if not any(hits(name, pattern) for name in modules):
            known = {*modules, *(own_class(module).__name__ for module in modules.values())}
            raise MatchError("checkpointing", f"include pattern {pattern!r} matches no module{nearest(pattern, known)}")
    chosen: list[str] = []
    lists: list[str] = []
    for name in modules:  # parents come before children, so the outermost match
        is_named = any(hits(name, pattern) for pattern in patterns) or name.rpartition(".")[0] in lists
        if is_named and not any(name.startswith(f"{o}.") for o in chosen):
            (chosen if _runs(modules[name]) else lists).append(name)
    return chosen
