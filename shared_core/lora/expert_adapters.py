"""Adapters on stacked experts: a pair of factors for each expert, whose product is added to the frozen stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shared_core.lora.config import LoraConfig
from shared_core.lora.quantized_base import on_qat_grid
from shared_core.modules.experts import expert_weights
from shared_core.modules.matching import change_class, own_class
from shared_core.modules.weight_views import output_axis
from shared_core.quantization.fake_quant_layers import FAKE_QUANT, STOCK, is_quantized, know_layers

_PREFIX = "lora_"
_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {}


class _Factors(nn.Module):
    """A of (experts, rank, inputs) and B of (experts, outputs, rank)."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)


class AdaptedStack:
    """One parameter that stacks the matrices of experts, and its adapters; stands for a layer of `lora`.

    The module keeps its place and its parameters; adapters are a child of it. Its state dicts hold the sums alone. peft
    computes the same with `target_parameters`, in wrappers that change the keys, hold adapters in the stack's 16 bits
    and parametrize the stack in each forward, which qat's layers do not allow (peft 0.21).

    Source: Hu et al., 2021, arXiv:2106.09685, section 4.1.
    """

    def __init__(self, module: nn.Module, name: str, config: LoraConfig, generator: torch.Generator) -> None:
        self.module, self.name, self.eff_config = module, name, config
        self.outputs_first = output_axis(module) == 1
        weight = self.weight
        experts, *sizes = weight.shape
        outputs, inputs = sizes if self.outputs_first else sizes[::-1]
        # in 16 bit the updates of small learning rates would be lost
        dtype = torch.promote_types(weight.dtype, torch.float32)
        bound = inputs**-0.5  # He's uniform with a = √5, as of a linear layer
        drawn = torch.empty(experts, config.rank, inputs).uniform_(-bound, bound, generator=generator)
        zeros = torch.zeros(experts, outputs, config.rank, dtype=dtype, device=weight.device)
        self.factors = _Factors(drawn.to(weight.device, dtype), zeros)
        kind = own_class(module)
        if kind not in _ADAPTED.values():
            if kind not in _ADAPTED:
                about = {"__doc__": f"{kind.__name__} with adapters.", "__module__": __name__}
                _ADAPTED[kind] = type(f"Adapted{kind.__name__}", (_AdaptedExperts, kind), about)
            change_class(module, kind, _ADAPTED[kind])
            vars(module)["adapted_stacks"] = []
            vars(module)["lora_hooks"] = [
                module.register_state_dict_post_hook(_plain_keys),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(_load_plain),  # type: ignore[no-untyped-call]
            ]
        module.add_module(_PREFIX + name, self.factors)
        vars(module)["adapted_stacks"].append(self)

    @property
    def weight(self) -> nn.Parameter:
        """The frozen stack."""
        return self.module._parameters[self.name]  # type: ignore[return-value]

    @property
    def plain(self) -> Tensor:
        """A tensor that has the device and the type of the user's weight."""
        return self.weight

    @property
    def base_layer(self) -> AdaptedStack:
        """The module that holds the frozen weight; bitsandbytes has no codes of stacks."""
        return self

    @property
    def user_layer(self) -> nn.Module:
        """The module, which qat may quantise."""
        return self.module

    @property
    def base(self) -> Tensor:
        """The stack that the adapters are added to: rounded, where qat does so by now."""
        weight = self.weight.detach()
        quantises = is_quantized(self.module) and self.module.quantizer.bank.quantizing  # type: ignore[union-attr]
        return on_qat_grid(self.module, weight) if quantises else weight

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the sum, added in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.base.to(wide) + self.product(wide)).to(dtype)

    def product(self, dtype: torch.dtype) -> Tensor:
        """Return ``alpha/rank·BA`` of each expert as the stack is laid out, summed in a type."""
        made = torch.bmm(self.factors.B.to(dtype) * self.eff_config.scale, self.factors.A.to(dtype))
        return made if self.outputs_first else made.mT

    def restore(self, weight: Tensor | None) -> None:
        """Take the adapters off, with another weight if there is one; the last stack gives the module its class."""
        if weight is not None:
            self.weight.data = weight.contiguous()
        module = self.module
        module._modules.pop(_PREFIX + self.name, None)
        vars(module)["adapted_stacks"].remove(self)
        if vars(module)["adapted_stacks"]:
            return
        for hook in vars(module).pop("lora_hooks"):
            hook.remove()
        del vars(module)["adapted_stacks"]
        kind = own_class(module)
        adapted = STOCK.get(kind, kind)
        stock = next(before for before, after in _ADAPTED.items() if after is adapted)
        change_class(module, kind, stock)
        if kind is not adapted:  # qat quantises it still
            know_layers(module)
            change_class(module, stock, FAKE_QUANT[stock])


class _AdaptedExperts(nn.Module):
    # reads its parameters as attributes, whatever multiplies them; dynamo does not follow attributes that come and go
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stock module computes with the sums."""
        before = {stack.name: vars(self).get(stack.name) for stack in vars(self)["adapted_stacks"]}
        try:
            for stack in vars(self)["adapted_stacks"]:
                base = getattr(self, stack.name)  # qat's rounded one where it is
                vars(self)[stack.name] = base + stack.product(base.dtype)
            return super().forward(*args, **kwargs)
        finally:
            for name, value in before.items():
                if value is None:
                    vars(self).pop(name, None)
                else:
                    vars(self)[name] = value


def stacks_of(module: nn.Module) -> list[str]:
    """Return the names of the parameters that stack experts and can be adapted."""
    return [name for name, weight in expert_weights(module).items() if weight.is_floating_point()]


def _plain_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for stack in vars(module)["adapted_stacks"]:
        for key in ("A", "B"):
            state_dict.pop(f"{prefix}{_PREFIX}{stack.name}.{key}", None)
        state_dict[prefix + stack.name] = stack.merged(stack.weight.dtype)


def _load_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # what is loaded is the whole stack: it becomes the base, and the adapters add nothing to it
    for stack in vars(module)["adapted_stacks"]:
        if prefix + stack.name in state_dict:
            stack.factors.B.data.zero_()
        own = stack.factors.named_parameters()
        state_dict.update((f"{prefix}{_PREFIX}{stack.name}.{key}", value) for key, value in own)
