"""Find experts that no token reached in training: their weights were pruned or quantized but never trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distributed.collectives import all_reduce_, world_size
from shared_core.errors import CheckpointError
from shared_core.modules.calls import RunHook, remove_hooks
from shared_core.modules.matching import StackedExperts, expert_weights, plain_name

_SHOWN = 5


class ExpertUse:
    """Records which stacked experts of transformers receive tokens in training forwards, until `close`."""

    def __init__(self) -> None:
        self._reached: dict[str, Tensor] = {}  # uint8, (experts + 1,): the last entry collects other processes' experts
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Watch the experts of a model whose forward gets each token's expert indices."""
        for name, module in model.named_modules():
            if isinstance(module, StackedExperts) and "has_gate" in vars(module):
                stack = next(iter(expert_weights(module).values()))
                self._reached[plain_name(name)] = torch.zeros(len(stack) + 1, dtype=torch.uint8, device=stack.device)
                hook = RunHook(self._hook(plain_name(name)))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not module.training:
                return
            index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
            if isinstance(index, Tensor):
                reached = self._reached[name]
                if reached.device != index.device:
                    reached = self._reached[name] = reached.to(index.device)
                reached.index_fill_(0, index.detach().reshape(-1).long().clamp(0, len(reached) - 1), 1)

        return hook

    def join(self) -> None:
        """Combine the records of all processes; every process must call it."""
        if world_size() > 1:
            for reached in self._reached.values():
                all_reduce_(reached, "max")

    def without_tokens(self) -> dict[str, list[int]]:
        """Return the experts that no token has reached, by module."""
        found = {name: (reached[:-1] == 0).nonzero().view(-1).tolist() for name, reached in self._reached.items()}
        return {name: experts for name, experts in found.items() if experts}

    def note(self) -> str:
        """Return a note about experts without tokens, empty if there are none."""
        found = self.without_tokens()
        if not found:
            return ""
        lines = [f"{name} {', '.join(map(str, experts))}" for name, experts in [*found.items()][:_SHOWN]]
        more = f"; and in {len(found) - _SHOWN} more modules" if len(found) > _SHOWN else ""
        return f"experts that received no token in training and so learned nothing: {'; '.join(lines)}{more}"

    def close(self) -> None:
        """Stop watching. The records stay."""
        remove_hooks(self._handles)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the records."""
        return {name: reached.clone() for name, reached in self._reached.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the records of a saved run. Modules that it did not watch start empty.

        Raises:
            CheckpointError: If a module had a different number of experts.
        """
        for name, seen in state.items():
            if name not in self._reached:
                continue
            reached = self._reached[name]
            if seen.shape != reached.shape:
                raise CheckpointError(
                    "resume",
                    f"{name} has {len(reached) - 1} experts, but {seen.numel() - 1} in the checkpoint",
                    "resume with the model that wrote the checkpoint",
                )
            reached.copy_(seen)
