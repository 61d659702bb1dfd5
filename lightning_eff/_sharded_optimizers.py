"""Optimizers of a sharded module, put back as they were saved, parameters without a state included.

Lightning (2.6) and torch (2.13) take it that every parameter has one, as after a first step in which all had gradients.
A file from before that step, of plain SGD, or of a part that had no gradient so far ends in an error of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from shared_core.sharded import whole


def load_optimizers_apart(
    fabric: ModuleType, original: Callable[..., dict[str, Any]], path: Path, state: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """Stand in for Lightning's ``_load_checkpoint`` of a strategy that shards; return what that does.

    Args:
        fabric: The module that it is in.
        original: It.
        path: A file, or a folder of shards.
        state: The module and its optimizers.
        options: Further ones of it.
    """
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    rest = {name: value for name, value in state.items() if name not in optimizers}
    found = original(path=path, state=rest, **options)
    (module,) = rest.values()
    for number, (name, optimizer) in enumerate(optimizers.items()):
        fresh = get_optimizer_state_dict(module, optimizer)  # steps with a rate of 0, which makes all states
        if Path(path).is_dir():
            saved, how = _of_folder(fabric, Path(path), name, fresh), StateDictOptions(cpu_offload=True)
        elif "optimizer_states" in found:
            saved = _by_names(found["optimizer_states"][number], module)
            how = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=options.get("strict", True))
        else:
            continue
        _put(module, optimizer, saved, fresh, how)
    return found


def _of_folder(fabric: ModuleType, path: Path, name: str, fresh: dict[str, Any]) -> dict[str, Any]:
    there = FileSystemReader(path).read_metadata().state_dict_metadata
    states = {
        key: state
        for key, state in fresh["state"].items()
        if all(f"{name}.state.{key}.{part}" in there for part in state)
    }
    asked: dict[str, Any] = {name: {**fresh, "state": states}}
    fabric._distributed_checkpoint_load(asked, path)
    return dict(asked[name])


def _by_names(saved: dict[str, Any], module: Any) -> dict[str, Any]:
    numbered = any(isinstance(key, int) for group in saved["param_groups"] for key in group["params"])
    if not numbered:
        return saved
    return FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_NAME, module)


def _put(
    module: Any, optimizer: Optimizer, saved: dict[str, Any], fresh: dict[str, Any], how: StateDictOptions
) -> None:
    lacking = {key: state for key, state in fresh["state"].items() if key not in saved["state"]}
    if not fresh["state"]:  # torch looks for a device among states
        for group, told in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in told.items() if key != "params"})
        return
    if how.full_state_dict:
        lacking = {key: {part: whole(value) for part, value in state.items()} for key, state in lacking.items()}
    both = {**saved, "state": {**saved["state"], **lacking}}
    set_optimizer_state_dict(module, optimizer, optim_state_dict=both, options=how)
    for group, told in zip(optimizer.param_groups, fresh["param_groups"], strict=True):
        for parameter, key in zip(group["params"], told["params"], strict=True):
            if key in lacking:
                optimizer.state.pop(parameter, None)
