"""Adapters of peft in the user's model: on which layers, under which keys in state dicts, and what they add up to.

Stacked experts get a pair of factors for each expert, whose product is added to the frozen stack.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import cut, is_sharded, whole
from shared_core.errors import CompatibilityError, MatchError, nearest
from shared_core.libraries import optional
from shared_core.lora.config import LoraConfig
from shared_core.lora.quantized_base import float_weight, freeze, frozen_tensors, linear_of, on_qat_grid, restore_
from shared_core.modules.attention import OpenAttention, project
from shared_core.modules.like_stock import stock_kind, why_not_stock
from shared_core.modules.made_classes import derived
from shared_core.modules.matching import (
    FROZEN,
    Matched,
    StackedExperts,
    change_class,
    chosen_modules,
    conv1d_of,
    expert_weights,
    frozen_helpers,
    own_class,
    plain_name,
    read_past_forward,
)
from shared_core.modules.weight_views import as_rows, from_rows, left_alone, output_axis, weights_of
from shared_core.numerics.rounding import sqnr
from shared_core.printing import listed
from shared_core.quantization.batch_norm import LEARNED
from shared_core.quantization.fake_quant_layers import FAKE_QUANT, STOCK, is_quantized, know_layers

_PREFIX = "lora_"
_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {}


def _adapted_kind(kind: type[nn.Module], base: type) -> type[nn.Module]:
    if kind not in _ADAPTED:
        _ADAPTED[kind] = derived("Adapted", base, kind, _adapted_kind)
    return _ADAPTED[kind]


class _Factors(nn.Module):
    """A of (experts, rank, inputs) and B of (experts, outputs, rank)."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)


class AdaptedStack:
    """One parameter that stacks the matrices of experts, and its adapters; stands for a layer of `lora`.

    A weight of attention counts as one expert.

    The module keeps its place and its parameters; adapters are a child of it. Its state dicts hold the sums alone. peft
    computes the same with `target_parameters`, in wrappers that change the keys, hold adapters in the stack's 16 bits
    and parametrize the stack in each forward, which qat's layers do not allow (peft 0.21).

    Source: Hu et al., 2021, arXiv:2106.09685, section 4.1.
    """

    def __init__(self, module: nn.Module, name: str, config: LoraConfig, generator: torch.Generator) -> None:
        self.module, self.name, self.eff_config = module, name, config
        weight = self.weight
        self.is_one = weight.ndim == 2
        self.outputs_first = self.is_one or output_axis(module) == 1
        experts, *sizes = (1, *weight.shape) if self.is_one else weight.shape
        outputs, inputs = sizes if self.outputs_first else sizes[::-1]
        # in 16 bit the updates of small learning rates would be lost
        dtype = torch.promote_types(weight.dtype, torch.float32)
        bound = inputs**-0.5  # He's uniform with a = √5, as of a linear layer
        drawn = torch.empty(experts, config.rank, inputs).uniform_(-bound, bound, generator=generator)
        zeros = torch.zeros(experts, outputs, config.rank, dtype=dtype, device=weight.device)
        self.factors = _Factors(drawn.to(weight.device, dtype), zeros)
        kind = own_class(module)
        if kind not in _ADAPTED.values():
            base = _AdaptedAttention if issubclass(kind, nn.MultiheadAttention) else _AdaptedExperts
            change_class(module, kind, _adapted_kind(kind, base))
            vars(module)["adapted_stacks"] = []
            vars(module)["lora_hooks"] = [
                module.register_state_dict_post_hook(_plain_stack),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(_load_plain_stack),  # type: ignore[no-untyped-call]
            ]
        module.add_module(_PREFIX + name, self.factors)
        vars(module)["adapted_stacks"].append(self)

    @property
    def weight(self) -> nn.Parameter:
        """The frozen stack."""
        return self.module._parameters[self.name]  # type: ignore[return-value]

    # What peft's layers have: a tensor of the device and type of the user's weight, what holds the frozen weight, as
    # bitsandbytes has no codes of stacks, and the module that qat may quantize.
    plain = weight
    base_layer = property(lambda self: self)
    user_layer = property(lambda self: self.module)

    @property
    def base(self) -> Tensor:
        """The stack that the adapters are added to: rounded, where qat does so by now."""
        weight = self.weight.detach()
        quantizes = is_quantized(self.module) and self.module.quantizer.bank.quantizing  # type: ignore[union-attr]
        return on_qat_grid(self.module, weight) if quantizes else weight

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the sum, added in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.base.to(wide) + self.product(wide)).to(dtype)

    def product(self, dtype: torch.dtype) -> Tensor:
        """Return ``alpha/rank·BA`` of each expert as the stack is laid out, summed in a type."""
        made = torch.bmm(self.factors.B.to(dtype) * self.eff_config.scale, self.factors.A.to(dtype))
        return made[0] if self.is_one else made if self.outputs_first else made.mT

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
        if kind is not adapted:  # qat quantizes it still
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


class _AdaptedAttention(OpenAttention):
    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the query, key and value projected by the sums."""
        weights: dict[str, Tensor] = dict(weights_of(self))
        for stack in vars(self)["adapted_stacks"]:
            weights[stack.name] = stack.weight + stack.product(stack.weight.dtype)

        def product(x: Tensor, name: str, rows: slice, bias: Tensor | None) -> Tensor:
            return F.linear(x, weights[name][rows], bias)

        return project(self, (query, key, value), product)


def _plain_stack(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for stack in vars(module)["adapted_stacks"]:
        for key in ("A", "B"):
            state_dict.pop(f"{prefix}{_PREFIX}{stack.name}.{key}", None)
        state_dict[prefix + stack.name] = stack.merged(stack.weight.dtype)


def _load_plain_stack(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # what is loaded is the whole stack: it becomes the base, and the adapters add nothing to it
    for stack in vars(module)["adapted_stacks"]:
        if prefix + stack.name in state_dict:
            stack.factors.B.data.zero_()
        own = stack.factors.named_parameters()
        state_dict.update((f"{prefix}{_PREFIX}{stack.name}.{key}", value) for key, value in own)


_ADAPTER = "default"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


_ONLY = "only linear layers, attention and experts get adapters; train it whole with --lora_train"
_NO_FILE = "torch's attention would not call adapters that PEFT loads; use save merged to adapt it"
_UNABLE: dict[type[nn.Module], str] = dict.fromkeys((nn.RNNBase, nn.RNNCellBase, nn.modules.conv._ConvNd), _ONLY)
"""Class → why its layers get no adapters."""


def select_layers(
    model: nn.Module, config: LoraConfig
) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, str]]:
    """Return (layers to adapt, modules to train whole, name → why a matched layer is left alone), by plain name.

    A parameter that stacks experts counts as a layer, by its own name, with the module that holds it.
    """
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, *conv1d_of(model))
    convolutions = sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    if not any(isinstance(module, (*kinds, StackedExperts)) for module in model.modules()):
        rule = f"only linear layers can be adapted, but {type(model).__name__} has none ({convolutions} convolutions)"
        raise MatchError("lora", rule, "train it without lora, for example with --low_rank_rank 8")
    matched = chosen_modules(config, model, (*kinds, StackedExperts, nn.MultiheadAttention), where="lora")
    helpers = frozen_helpers(model)
    every: Any = [(plain_name(name), module) for name, module in model.named_modules() if isinstance(module, kinds)]
    linear = [(name, module) for name, module in every if id(module) not in helpers]
    output_name, output = linear[-1]
    # remove_duplicate=False counts a tied parameter once for each holder.
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    asked = bool(config.include) and any(found.module is output for found in matched)
    whole = _trained_whole(model, config.train, output_name)
    # A classifier has fewer outputs than inputs and is new in most fine-tunings: an adapter would not do.
    if not config.train and not asked and _is_classifier(output) and owners[id(output.weight)] == 1:
        whole = {output_name: output}
    inside = {id(module) for top in whole.values() for module in top.modules()}
    # transformers' list, which it keeps from bitsandbytes: T5 casts activations to the type of such a layer's weight
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ())} if config.base != "none" else set()
    readers = read_past_forward(model)
    frozen = {} if config.include else helpers | _frozen(matched, inside)
    layers: dict[str, Any] = {}
    left_out = left_alone(model, _UNABLE, inside)
    # In this order: reasons that the user decides on come before those of the model.
    for found, stack in [(one, own) for one in matched for own in _parameters_of(one)]:
        module = found.module
        name = f"{found.name}.{stack}".removeprefix(".") if stack else found.name
        reason = _why_no_stack(module, stack, config) if stack else _why_not(name, module, kinds, config)
        if id(module) in inside:
            reason = "it is trained in full"
        elif module is output and not asked:
            reason = "it is the output layer, which stays in float unless include names it"
        elif reason is None and any(owners[id(parameter)] > 1 for parameter in module.parameters()):
            reason = "its weight is shared with another module"
        elif reason is None and kept & {*found.name.split(".")}:
            reason = f"{type(model).__name__} needs it in float32; use base none to adapt it"
        elif reason is None and id(module) in readers:
            reason = f"{readers[id(module)]}, bypassing any adapter"
        reason = reason or frozen.get(id(module))
        if reason is None:
            layers[name] = module
        elif not {*found.names}.isdisjoint(config.include):
            raise CompatibilityError("lora", f"include must name layers that can be adapted, got {name}: {reason}")
        else:
            left_out[name] = str(reason)
    if not layers and config.train and all(id(module) in inside for _, module in linear):
        rule = f"train must leave a linear layer to adapt, but {listed(config.train)} matches all of them"
        raise MatchError("lora", rule, "name fewer modules in --lora_train")
    if not layers and all(id(module) in inside for _, module in linear):
        only = ", ".join(whole)
        rule = f"only linear layers can be adapted, but {type(model).__name__} has only {only}, trained in full"
        rule += " (convolutions get no adapters)" if convolutions else ""
        remedy = f"write --lora_include '{only}' to adapt it, or freeze the rest yourself and train without lora"
        raise MatchError("lora", rule, remedy)
    if not layers:
        message = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise MatchError("lora", "must match at least one linear layer that can be adapted", message)
    return layers, whole, left_out


def _frozen(matched: list[Matched], inside: Collection[int]) -> dict[int, str]:
    """Return module id → reason for layers that the user has frozen. None if they are most of the model."""
    able = {found.module for found in matched if id(found.module) not in inside}
    frozen = {module for module in able if not any(value.requires_grad for value in module.parameters())}
    # most of a model is frozen if only a new head trains: that is the base to adapt, as peft does
    sizes = [sum(value.numel() for module in some for value in module.parameters()) for some in (frozen, able)]
    return dict.fromkeys(map(id, frozen), FROZEN) if 2 * sizes[0] < sizes[1] else {}


def _is_classifier(output: nn.Module) -> bool:
    outputs, inputs = as_rows(output, output.weight).shape  # type: ignore[arg-type]
    return outputs < inputs


def _why_not(name: str, module: nn.Module, kinds: tuple[type[nn.Module], ...], config: LoraConfig) -> str | None:
    if stock_kind(own_class(module)) not in kinds:
        return why_not_stock(module)
    if own_class(module) is NonDynamicallyQuantizableLinear and config.save == "adapters":
        return _NO_FILE
    if not name:
        return "it is the model itself, which cannot be replaced; wrap it in a module"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed by other code (a parametrization, torch.nn.utils.prune)"
    if not weight.is_floating_point() or (config.base != "none" and weight.dtype not in _FLOATS):
        return f"its weight is {weight.dtype}, not float32, bfloat16 or float16"
    return None


def _parameters_of(found: Matched) -> tuple[str, ...]:
    """Return the parameters that get adapters of their own, or an empty name for a layer that does."""
    packed = weights_of(found.module) if isinstance(found.module, nn.MultiheadAttention) else {}
    return (found.parameter,) if found.parameter else (*packed,) or ("",)


def _why_no_stack(module: nn.Module, name: str, config: LoraConfig) -> str | None:
    if isinstance(module, nn.MultiheadAttention):
        if stock_kind(own_class(module)) is None:
            return why_not_stock(module)
        if config.save == "adapters":
            return _NO_FILE
        if not module.get_parameter(name).is_floating_point():
            return "its weight is not floating point"
        return "dropout cannot act on the inputs of its adapters" if config.dropout else None
    if (weight := expert_weights(module).get(name)) is None or not weight.is_floating_point():
        return "its experts are not floating point"
    return "dropout cannot act on the inputs of an expert's adapters" if config.dropout else None


def _trained_whole(model: nn.Module, patterns: tuple[str, ...], output: str) -> dict[str, nn.Module]:
    names = {plain_name(name): module for name, module in model.named_modules()}
    whole: dict[str, nn.Module] = {}
    for asked in () if patterns == ("none",) else patterns:
        pattern = output if asked == "last" else asked
        hits = {
            name: module
            for name, module in names.items()
            if fnmatch.fnmatchcase(name, pattern) or own_class(module).__name__ == pattern
        }
        if not hits:
            raise MatchError("lora", f"train pattern {asked!r} matches no module{nearest(asked, names)}")
        whole |= hits
    return whole


def inject(
    model: nn.Module, layers: dict[str, nn.Module], config: LoraConfig, generator: torch.Generator
) -> dict[str, Any]:
    """Put adapters on `layers`, and on stacked experts after them; return peft's layers and stacks by plain name."""
    packed = (StackedExperts, nn.MultiheadAttention)
    stacks = {name: module for name, module in layers.items() if isinstance(module, packed)}
    linear: Any = {name: module for name, module in layers.items() if name not in stacks}
    adapted = _inject(model, linear, config, generator) if linear else {}
    return adapted | {
        name: AdaptedStack(module, name.rpartition(".")[2], config, generator) for name, module in stacks.items()
    }


def _inject(
    model: nn.Module, layers: dict[str, nn.Linear], config: LoraConfig, generator: torch.Generator
) -> dict[str, Any]:
    """Put frozen bases with adapters in the place of `layers` and return peft's layers by plain name."""
    # Hu et al., 2021, arXiv:2106.09685, section 4.1. `A` is drawn by He's uniform initialization, as peft does it, and
    # `B` is zero: the model computes what its frozen base does.
    peft = optional("peft", "lora", "lora")
    paths = {id(module): path for path, module in model.named_modules()}
    where = {name: paths[id(module)] for name, module in layers.items()}
    # Frozen before anything of the model is replaced: an error leaves it whole.
    bases = {name: freeze(module, config) for name, module in layers.items()}
    asked = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        # Exact paths as one pattern: peft's matching by suffix could reach layers of the same ending elsewhere.
        target_modules="|".join(re.escape(path) for path in where.values()),
    )
    hidden = ["_device_mesh"]  # Lightning's, which peft (0.21) takes for transformers'
    if are_translated(asked, model):
        hidden.append("config")
    # Taken out of the instance for the call alone.
    put_aside = {name: vars(model).pop(name) for name in hidden if name in vars(model)}
    try:
        for name, base in bases.items():
            model.set_submodule(where[name], base)
        # peft draws A with the global generator: forked, so that a run with lora draws the same numbers otherwise.
        # Ours are drawn below, from the run's generator.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # Conv1D's, which peft sees by itself
            peft.inject_adapter_in_model(asked, model, _ADAPTER)
    except BaseException as error:
        for name, module in layers.items():
            model.set_submodule(where[name], module)
        if isinstance(error, ValueError):  # peft has lists of layers by architecture
            rule = f"layers must be those that peft can adapt, got {error}"
            raise CompatibilityError("lora", rule, "leave them out with skip (--lora_skip)") from error
        raise
    finally:
        # trainers would take it for peft's own model, whose checkpoints hold adapters alone
        vars(model).pop("peft_config", None)
        vars(model).update(put_aside)
    adapted: dict[str, Any] = {}
    for name, module in layers.items():
        adapted[name] = model.get_submodule(where[name])
        _stand_for_(adapted[name], module, config, generator)
    return adapted


def _stand_for_(layer: Any, module: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
    """Draw A, and have peft's layer keep the user's beside it, whose keys it has in state dicts."""
    for matrix in adapters(layer):
        # in 16 bit the updates of small learning rates would be lost
        matrix.data = matrix.data.to(module.weight.device, torch.promote_types(module.weight.dtype, torch.float32))
    a, b = adapters(layer)
    # As peft and Hu et al. (2021, arXiv:2106.09685, section 4.1): A random, B zero, so that BA = 0 and training
    # starts from the model as it is.
    drawn = nn.init.kaiming_uniform_(torch.empty(a.shape), a=5**0.5, generator=generator)
    with torch.no_grad():
        a.copy_(drawn)
        b.zero_()
    layer.train(module.training)
    # follows the model to another device and dtype, which the layer put aside does not
    layer.register_buffer("plain", module.weight.new_zeros(1), persistent=False)
    # Past nn.Module's own __setattr__, which would register it as a child, with its weight in state dicts twice.
    object.__setattr__(layer, "user_layer", module)
    # Checkpoints hold `weight` of the merged layer, so that they load without peft and without this library.
    layer.register_state_dict_post_hook(_plain_keys)
    layer.register_load_state_dict_pre_hook(_load_plain)
    layer.eff_config = config


def are_translated(asked: Any, model: nn.Module) -> bool:
    """Return True if peft takes names of layers for those of transformers 4, whose experts were layers of their own."""
    # peft (0.21) then adapts the fused experts in place of layers that have such names today: the dense and the shared
    # ones of DeepSeek-V3.
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older peft does not translate
        return False
    # A copy: the conversion writes into the config that it is given.
    tried = copy.deepcopy(asked)
    try:
        convert_peft_config_for_transformers(tried, model=model, conversions=None)
    except ValueError:
        return True
    return bool(tried.target_modules != asked.target_modules)


def adapters(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the adapters (A of (rank, inputs), B of (outputs, rank)) of one of peft's layers."""
    if isinstance(layer, AdaptedStack):
        return layer.factors.A, layer.factors.B
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight


def base_weight(layer: Any) -> Tensor:
    """Return the frozen weight under the adapters, in float and as it lies in the user's layer."""
    if isinstance(layer, AdaptedStack):
        return layer.base
    weight, user = float_weight(layer.base_layer), layer.user_layer
    return weight if layer.base_layer is user else from_rows(user, weight, weight)


@torch.no_grad()
def merged_weight(layer: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``Q⁻¹(Q(W)) + alpha/rank·BA``, summed in float32 at least; Q is qat's where it quantizes the base.

    Of a sharded layer it is sharded alike; then every process must call it.
    """
    dtype = dtype or layer.plain.dtype
    if isinstance(layer, AdaptedStack):
        return layer.merged(dtype)
    a, b = adapters(layer)
    base = base_weight(layer)
    wide = torch.promote_types(dtype, torch.float32)
    # BA is summed wide and rounded once, with the base: 16-bit factors rounded alone would lose more.
    added = from_rows(layer.user_layer, layer.scaling[_ADAPTER] * (whole(b).to(wide) @ whole(a).to(wide)), base)
    # cut: A and B are gathered, the base may be sharded; each process adds its part.
    merged: Tensor = base.to(wide) + cut(added, base)
    return merged.to(dtype)


def _plain_keys(layer: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    # state dicts are the plain model's: checkpoints, soups and teachers read the merged weight
    # Everything peft has under this prefix: base_layer, lora_A, lora_B.
    for key in [key for key in state_dict if key.startswith(prefix)]:
        del state_dict[key]
    state_dict[prefix + "weight"] = merged_weight(layer)
    bias = layer.user_layer.bias  # not the base's, which bitsandbytes casts in place to the type of its input
    if bias is not None:
        state_dict[prefix + "bias"] = bias.detach().to(layer.plain.device, layer.plain.dtype)


def _load_plain(layer: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    # what is loaded is the whole weight: it becomes the base, and the adapters add nothing to it
    # torch's hook passes (metadata, strict, missing keys, ...): missing ones are told through the list.
    missing: list[str] = args[2]
    user: nn.Linear = layer.user_layer
    for name, current in user._parameters.items():
        key = prefix + name
        if current is None or name in LEARNED:
            continue
        if key not in state_dict:
            missing.append(key)
        elif name == "weight":
            set_base_(layer, state_dict.pop(key))
        elif is_sharded(current):
            local_part(current.detach()).copy_(local_part(state_dict.pop(key)))
        else:
            # Both biases: the user's, and the copy that the frozen base computes with.
            current.data = state_dict.pop(key).detach().to(layer.plain).clone()
            layer.base_layer.bias.data = current.data.clone()
    # frozen codes and adapters are in place; torch only has to find them
    state_dict.update((prefix + name, parameter) for name, parameter in layer.named_parameters())


@torch.no_grad()
def set_base_(layer: Any, weight: Tensor) -> None:
    """Freeze `weight` under the adapters, whose B becomes zero: the layer then computes with ``Q⁻¹(Q(weight))``."""
    user: nn.Linear = layer.user_layer
    value = weight.detach().to(layer.plain.device, layer.plain.dtype)
    # An empty one was released: nothing holds the float weight then, and codes are all there is.
    if user.weight.numel():
        user.weight.data.copy_(value)
    if layer.base_layer is not user:
        # Quantized anew by the same rules, and restored in place, as optimizers and state dicts hold the tensors.
        frozen = freeze(linear_of(as_rows(user, value)), layer.eff_config)
        restore_(layer.base_layer, frozen_tensors(frozen))
        layer.eff_loaded_db = sqnr(value, base_weight(layer))  # told at the end: rounding was not asked for
    # B = 0: adapters were of another base.
    adapters(layer)[1].zero_()


@contextlib.contextmanager
def user_layers(model: nn.Module, layers: Collection[Any]) -> Iterator[None]:
    """Let a model hold the user's own layers inside, for weights to be loaded by their names.

    They become the base, and the adapters add nothing to it.
    """
    places = {path: module for path, module in model.named_modules() if module in layers}
    for path, layer in places.items():
        model.set_submodule(path, layer.user_layer)
    try:
        yield
    finally:
        for path, layer in places.items():
            model.set_submodule(path, layer)
            # What was loaded is whole weights: see `set_base_`.
            local_part(adapters(layer)[1].detach()).zero_()


def release_(layer: Any) -> None:
    """Drop the user's float weight, of which the frozen base was made, once and for all."""
    if not isinstance(layer, AdaptedStack) and layer.base_layer is not layer.user_layer:
        weight = layer.user_layer.weight
        # Emptied, not deleted: the parameter is still in the layer that comes back at the end.
        weight.data = weight.data.new_empty(0)


def restore_layer(model: nn.Module, layer: Any, weight: Tensor | None) -> None:
    """Put the user's own layer back where `layer` still is, `weight` in its own parameter, None for what it has."""
    if isinstance(layer, AdaptedStack):
        layer.restore(weight)
        return
    user: nn.Linear = layer.user_layer
    path = next((path for path, module in model.named_modules() if module is layer), None)
    if path is None:  # somebody replaced it
        return
    if layer.base_layer is not user:  # else it is part of the model; what qat learns on it keeps its dtype
        user.to(layer.plain.device, layer.plain.dtype)
    if weight is not None and is_sharded(user.weight):  # FSDP2 gathers from where it lies
        local_part(user.weight.detach()).copy_(local_part(weight))
    elif weight is not None:
        user.weight.data = weight
    user.train(layer.training)
    model.set_submodule(path, user)
