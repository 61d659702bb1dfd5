"""FSDP2 of a whole module: which parts are sharded, their precision and prefetching, and optimizer state.

Lightning (2.6) and torch (2.13) expect a state for every parameter, as after a first step with all gradients. They fail
on files from before that step, of plain SGD, or with a parameter that had no gradient yet. So we restore the state as
it was saved, including parameters without a state.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OptimStateKeyType,
    fully_shard,
)
from torch.optim import Optimizer

from shared_core.distributed.sharded_tensors import whole
from shared_core.errors import CompatibilityError, ConfigError, MatchError, nearest
from shared_core.modules.matching import own_class


def load_optimizers_apart(
    fabric: ModuleType, original: Callable[..., dict[str, Any]], path: Path, state: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Replace Lightning's ``_load_checkpoint`` of a sharding strategy, with the same result."""
    # Lightning's loader of distributed checkpoints asks for every state that the optimizer would have, and fails if a
    # parameter without gradients has none. So it loads the weights, and we load the optimizers.
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    rest = {name: value for name, value in state.items() if name not in optimizers}
    found = original(path=path, state=rest, **options)
    (module,) = (value for value in rest.values() if isinstance(value, nn.Module))
    state.update(rest)
    for number, (name, optimizer) in enumerate(optimizers.items()):
        fresh = get_optimizer_state_dict(module, optimizer)  # creates all states by steps with a rate of 0
        # A folder of shards: ask only for the states in it. Keys are `name.state.parameter.part`.
        if Path(path).is_dir():
            saved, how = _of_folder(fabric, Path(path), name, fresh), StateDictOptions(cpu_offload=True)
        # A file holds whole tensors: the main process reads, and torch splits and sends the parts.
        elif name in found or "optimizer_states" in found:  # from a Fabric loop, from a Trainer
            saved = _by_names(found.pop(name) if name in found else found["optimizer_states"][number], module)
            how = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=options.get("strict", True))
        else:
            continue
        _put(module, optimizer, saved, fresh, how)
    return found


def _of_folder(fabric: ModuleType, path: Path, name: str, fresh: dict[str, Any]) -> dict[str, Any]:
    # Metadata only, no tensors are read.
    there = FileSystemReader(path).read_metadata().state_dict_metadata
    states = {
        key: state
        for key, state in fresh["state"].items()
        if all(f"{name}.state.{key}.{part}" in there for part in state)
    }
    asked: dict[str, Any] = {name: {**fresh, "state": states}}
    # Loads into `asked` in place: the fresh tensors give dtype, layout and device.
    fabric._distributed_checkpoint_load(asked, path)
    return dict(asked[name])


def _by_names(saved: dict[str, Any], module: Any) -> dict[str, Any]:
    # Older files number parameters as torch's optimizers do; sharded ones use names.
    numbered = any(isinstance(key, int) for group in saved["param_groups"] for key in group["params"])
    if not numbered:
        return saved
    return FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_NAME, module)


def _put(
    module: Any, optimizer: Optimizer, saved: dict[str, Any], fresh: dict[str, Any], how: StateDictOptions
) -> None:
    # torch rejects a state dict that lacks a parameter. Use its fresh state as a placeholder and remove it below: a
    # parameter that has never stepped must start with step 0 and no moments.
    lacking = {key: state for key, state in fresh["state"].items() if key not in saved["state"]}
    if not fresh["state"]:  # torch looks for a device in the states
        for group, entry in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in entry.items() if key != "params"})
        return
    # In a full state dict all tensors must be whole, including placeholders.
    if how.full_state_dict:
        lacking = {key: {part: whole(value) for part, value in state.items()} for key, state in lacking.items()}
    both = {**saved, "state": {**saved["state"], **lacking}}
    set_optimizer_state_dict(module, optimizer, optim_state_dict=both, options=how)
    for group, entry in zip(optimizer.param_groups, fresh["param_groups"], strict=True):
        for parameter, key in zip(group["params"], entry["params"], strict=True):
            # Groups and names are in the same order.
            if key in lacking:
                optimizer.state.pop(parameter, None)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a module is sharded. Fields as in `EffFSDPStrategy`."""

    blocks: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0

    def __post_init__(self) -> None:
        """Check values that torch would silently accept."""
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, "float32", "bfloat16", "float16"):
                raise ConfigError(
                    "eff_fsdp", f"{name} must be float32, bfloat16 or float16, got {getattr(self, name)!r}"
                )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError("eff_fsdp", f"{name} must be in [0, inf), got {getattr(self, name)}")

    def apply(self, root: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a module in place. A module that this has sharded already is unchanged."""
        if isinstance(root, FSDPModule):
            return
        sharded = next((name for name, module in root.named_modules() if isinstance(module, FSDPModule)), None)
        if sharded is not None:
            raise CompatibilityError(
                "eff_fsdp",
                f"module must not shard itself, but {sharded} is sharded",
                "leave fully_shard out of configure_model, or pass strategy=ModelParallelStrategy()",
            )
        # Blocks are gathered, computed and freed one by one: their size determines the memory peak.
        blocks = named_blocks(root, self.blocks) if self.blocks else repeated_blocks(root)
        if not blocks and (self.forward_prefetch or self.backward_prefetch):
            raise ConfigError(
                "eff_fsdp",
                "blocks must be given for prefetching (forward_prefetch, backward_prefetch): "
                f"{type(root).__name__} has no repeated ones",
            )
        policy = MixedPrecisionPolicy(_dtype(self.param_dtype), _dtype(self.reduce_dtype))
        for block in reversed(blocks):  # torch needs inner ones first
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        # the root's own weights are needed again as soon as backward begins
        fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        # In forward order. Otherwise the wrong blocks would be gathered and held.
        _prefetch(blocks, self.forward_prefetch, "set_modules_to_forward_prefetch")
        _prefetch(blocks[::-1], self.backward_prefetch, "set_modules_to_backward_prefetch")


def _prefetch(blocks: list[Any], ahead: int, setter: str) -> None:
    for index, block in enumerate(blocks):
        if following := blocks[index + 1 : index + 1 + ahead]:
            getattr(block, setter)(following)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)  # type: ignore[no-any-return]


def named_blocks(root: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return the modules that match class names or name patterns, in the order of registration."""
    # Modules without parameters have nothing to shard: activations, empty containers.
    able = {name: module for name, module in root.named_modules() if name and _uses(module)}
    found = set()
    for pattern in patterns:
        hits = {
            name
            for name, module in able.items()
            if fnmatch.fnmatchcase(name, pattern) or own_class(module).__name__ == pattern
        }
        if not hits:
            kinds = {own_class(module).__name__ for module in able.values()}
            raise MatchError(
                "eff_fsdp", f"blocks pattern {pattern!r} matches no module{nearest(pattern, [*able, *kinds])}"
            )
        found |= hits
    return [module for name, module in able.items() if name in found]


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that repeat in a ModuleList or Sequential with the same class.

    Modules without parameters, modules that share one with a module outside, and layers with adapters are left out. The
    latter disappear when adapters are merged.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> [type(block).__name__ for block in repeated_blocks(net)]
        ['Linear', 'Linear']
    """
    found: list[nn.Module] = []
    # Count uses of each parameter in the whole model and in a block: a block can be sharded if it has all uses of its
    # weights. A weight tied to one outside (embedding and head) must stay with the root.
    uses = Counter(_uses(root))

    def search(module: nn.Module) -> None:
        kinds = Counter(type(child) for child in module.children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            own = Counter(_uses(child))
            # An adapter (LoRA) around a user's layer belongs to that layer's block: it is not a block itself.
            stays = not hasattr(child, "user_layer")
            if listed and stays and kinds[type(child)] > 1 and own and all(uses[key] == own[key] for key in own):
                found.append(child)
            else:
                search(child)

    search(root)
    return found


def _uses(module: nn.Module) -> list[int]:
    # Parameters in registration order; ties appear as often as they are registered.
    modules = itertools.chain.from_iterable(inner.parameters(recurse=False) for inner in module.modules())
    return [id(parameter) for parameter in modules]


def through_root(root: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, called inside a sharded root's forward, where its weights are gathered.

    Inside, the root's own forward is restored.
    """
    # On the instance: the class's forward is unchanged, and an instance's wrapper (ours, a compiler's) is restored
    # afterwards.
    was_set, before = "forward" in vars(root), root.forward

    def restore() -> None:
        if was_set:
            root.forward = before
        else:
            vars(root).pop("forward", None)

    def once(*args: Any, **kwargs: Any) -> Any:
        # First, so that the function may call the module's real forward.
        restore()
        return function(*args, **kwargs)

    root.forward = once
    try:
        # __call__, not forward: FSDP2 gathers in hooks around it.
        return root(*args, **kwargs)
    finally:
        restore()
