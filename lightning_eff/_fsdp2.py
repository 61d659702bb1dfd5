"""FSDP2 of a whole module: which parts are sharded, with which precision and prefetching, and their optimizer state.

Lightning (2.6) and torch (2.13) expect a state of every parameter, as after a first step in which all had gradients.
They fail on a file from before that step, of plain SGD, or of a parameter without a gradient so far. So the state is
restored here as it was saved, parameters without a state included.
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
    """Stand in for Lightning's ``_load_checkpoint`` of a strategy that shards; return what that does."""
    # Lightning's loader of distributed checkpoints asks for every state that the optimizer would have; one that a
    # parameter without a gradient never got is then an error. So weights are loaded by it, optimizers apart.
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    rest = {name: value for name, value in state.items() if name not in optimizers}
    found = original(path=path, state=rest, **options)
    (module,) = (value for value in rest.values() if isinstance(value, nn.Module))
    state.update(rest)
    for number, (name, optimizer) in enumerate(optimizers.items()):
        fresh = get_optimizer_state_dict(module, optimizer)  # steps with a rate of 0, which makes all states
        # A folder of shards: ask for those states only that the folder has, each key being
        # `name.state.parameter.part`.
        if Path(path).is_dir():
            saved, how = _of_folder(fabric, Path(path), name, fresh), StateDictOptions(cpu_offload=True)
        # A file holds whole tensors: the main process reads, and torch cuts and sends the parts.
        elif name in found or "optimizer_states" in found:  # of a loop of Fabric, of a Trainer
            saved = _by_names(found.pop(name) if name in found else found["optimizer_states"][number], module)
            how = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=options.get("strict", True))
        else:
            continue
        _put(module, optimizer, saved, fresh, how)
    return found


def _of_folder(fabric: ModuleType, path: Path, name: str, fresh: dict[str, Any]) -> dict[str, Any]:
    # Metadata alone, no tensors are read.
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
    # Older files number parameters as torch's optimizers do; sharded ones go by name.
    numbered = any(isinstance(key, int) for group in saved["param_groups"] for key in group["params"])
    if not numbered:
        return saved
    return FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_NAME, module)


def _put(
    module: Any, optimizer: Optimizer, saved: dict[str, Any], fresh: dict[str, Any], how: StateDictOptions
) -> None:
    # torch refuses a state dict that lacks a parameter. Its fresh state stands in, and is taken out again below: a
    # parameter that has never stepped must begin with step 0 and no moments.
    lacking = {key: state for key, state in fresh["state"].items() if key not in saved["state"]}
    if not fresh["state"]:  # torch looks for a device among states
        for group, told in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in told.items() if key != "params"})
        return
    # In a full state dict all tensors must be whole, so the stand-ins too.
    if how.full_state_dict:
        lacking = {key: {part: whole(value) for part, value in state.items()} for key, state in lacking.items()}
    both = {**saved, "state": {**saved["state"], **lacking}}
    set_optimizer_state_dict(module, optimizer, optim_state_dict=both, options=how)
    for group, told in zip(optimizer.param_groups, fresh["param_groups"], strict=True):
        for parameter, key in zip(group["params"], told["params"], strict=True):
            # Groups and names are in one order.
            if key in lacking:
                optimizer.state.pop(parameter, None)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a module is sharded; the fields are those of `EffFSDPStrategy`."""

    blocks: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0

    def __post_init__(self) -> None:
        """Check what torch would take without a word."""
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, "float32", "bfloat16", "float16"):
                raise ConfigError(
                    "eff_fsdp", f"{name} must be float32, bfloat16 or float16, got {getattr(self, name)!r}"
                )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError("eff_fsdp", f"{name} must be in [0, inf), got {getattr(self, name)}")

    def apply(self, root: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a module in place; one that this has sharded before stays as it is."""
        if isinstance(root, FSDPModule):
            return
        sharded = next((name for name, module in root.named_modules() if isinstance(module, FSDPModule)), None)
        if sharded is not None:
            raise CompatibilityError(
                "eff_fsdp",
                f"module must not shard itself, but {sharded} is sharded",
                "leave fully_shard out of configure_model, or pass strategy=ModelParallelStrategy()",
            )
        # Blocks are the units that are gathered, computed and freed: their size decides the peak.
        blocks = named_blocks(root, self.blocks) if self.blocks else repeated_blocks(root)
        if not blocks and (self.forward_prefetch or self.backward_prefetch):
            raise ConfigError(
                "eff_fsdp",
                "blocks must be given to be gathered ahead (forward_prefetch, backward_prefetch), got a "
                f"{type(root).__name__} without repeated ones",
            )
        policy = MixedPrecisionPolicy(_dtype(self.param_dtype), _dtype(self.reduce_dtype))
        for block in reversed(blocks):  # torch wants inner ones first
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        # the root's own weights are wanted again as soon as backward begins
        fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        # In the order of the forward. The wrong order would gather what is not wanted next, and hold it.
        _prefetch(blocks, self.forward_prefetch, "set_modules_to_forward_prefetch")
        _prefetch(blocks[::-1], self.backward_prefetch, "set_modules_to_backward_prefetch")


def _prefetch(blocks: list[Any], ahead: int, setter: str) -> None:
    for index, block in enumerate(blocks):
        if following := blocks[index + 1 : index + 1 + ahead]:
            getattr(block, setter)(following)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)  # type: ignore[no-any-return]


def named_blocks(root: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return the modules of these class names or name patterns, in the order of registration."""
    # Without parameters there is nothing to shard: activations, containers of none.
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
    """Return the outermost modules that stand two or more in one ModuleList or Sequential with the same class.

    Left out is what has no parameters, what shares one with a module outside of it, and a layer with adapters, which is
    not there any more when these are merged.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> [type(block).__name__ for block in repeated_blocks(net)]
        ['Linear', 'Linear']
    """
    found: list[nn.Module] = []
    # How often each parameter is used in the whole model, and in a block: a block with all uses of its own weights
    # can be sharded. A weight tied to one outside (embedding and head) must stay with the root.
    uses = Counter(_uses(root))

    def search(module: nn.Module) -> None:
        kinds = Counter(type(child) for child in module.children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            own = Counter(_uses(child))
            # An adapter (LoRA) around a user's layer belongs to the block that this layer is in: it is no block
            # itself.
            stays = not hasattr(child, "user_layer")
            if listed and stays and kinds[type(child)] > 1 and own and all(uses[key] == own[key] for key in own):
                found.append(child)
            else:
                search(child)

    search(root)
    return found


def _uses(module: nn.Module) -> list[int]:
    # Parameters in the order of registration; ties appear as often as they are registered.
    modules = itertools.chain.from_iterable(inner.parameters(recurse=False) for inner in module.modules())
    return [id(parameter) for parameter in modules]


def through_root(root: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, called as the forward of a sharded root: its weights are gathered there.

    Inside, the root's own forward is in place again.
    """
    # In the instance: a class's own forward stays, and an instance's wrapper (ours, a compiler's) is put back as it
    # was.
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
        # __call__ and not forward: FSDP2's gathering is in hooks around it.
        return root(*args, **kwargs)
    finally:
        restore()
