"""Calibrate scales for an FP8 cache of keys and values, save them with the ranges, and measure the error."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError, nearest
from shared_core.modules.calls import call_model, evaluated
from shared_core.modules.matching import plain_name
from shared_core.numerics.rounding import SignalToNoise

_WHERE = "calibrate_kv_cache"
_CACHES = ("cache", "past_key_values")  # its names in transformers: from 5.24, and before
_SCALES = ("k_scale", "v_scale")
_LARGEST = 448.0  # of e4m3
Change = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class KvCacheReport:
    """Scales and error of an FP8 cache of keys and values.

    Attributes:
        scales: Attention layer → ``{"k_scale", "v_scale"}``, which `apply_ranges` accepts among the ranges.
        sqnr_db: Attention layer → signal to quantization noise ratio of its keys and values in dB.
        loss: Mean cross-entropy of the next token on the batches, with the cache in float; None for models without
            logits of tokens.
        rounded_loss: The same with the cache in FP8.
    """

    scales: dict[str, dict[str, float]]
    sqnr_db: dict[str, dict[str, float]]
    loss: float | None
    rounded_loss: float | None


def calibrate_kv_cache(
    model: nn.Module,
    batches: Iterable[Any],
    kv_cache: str = "fp8",
    *,
    progress: Callable[[int, int], None] | None = None,
) -> KvCacheReport:
    """Set FP8 cache scales on a decoder's attention layers, ``max|x| / 448``; return them and their error.

    Keys (after the rotary embedding) and values are measured as they enter the cache. Values larger than in the
    batches will saturate. The model itself computes as before. An engine that reads the scales
    (`export_compressed_tensors`) keeps the cache in FP8, and so does a model within `rounding_kv_cache`.

    Args:
        model: A decoder of transformers as it will be served, quantized or in float. Its attention layers store the
            scales.
        batches: Inputs of the model, at least one. Tokens masked by ``attention_mask`` do not count.
        kv_cache: The format; ``fp8`` is e4m3.
        progress: Called with (batches run, batches to run) after each. Each batch is run twice.

    Raises:
        ConfigError: If an argument is invalid, or the model does not accept a batch.
        CompatibilityError: If no attention layer fills a cache, or the model has an encoder too.
        TrainingError: If keys or values are not finite, or all 0.

    Source: Micikevicius et al. 2022, arXiv:2209.05433 (the format); vLLM 0.32 (one scale per layer for keys, one for
    values).

    Example:
        ``calibrate_kv_cache(apply_ranges(model, ranges), batches).scales["model.layers.0.self_attn"]["k_scale"]``
    """
    check_kv_cache(model, kv_cache, _WHERE)
    held = list(batches)
    if not held:
        raise ConfigError(_WHERE, "batches must have at least one batch, got none")
    largest: dict[str, Tensor] = {}
    noise: dict[str, tuple[SignalToNoise, SignalToNoise]] = {}
    run = functools.partial(_losses, model, held, progress)

    def observe(batch: Any, name: str, *states: Tensor) -> tuple[Tensor, ...]:
        found = torch.stack([_tokens(state, batch).abs().amax().float() for state in states])
        largest[name] = torch.maximum(found, largest.get(name, torch.zeros_like(found)))  # keeps NaN
        return states

    def compare(batch: Any, name: str, *states: Tensor) -> tuple[Tensor, ...]:
        rounded = _rounded(scales[name], *states)
        sums = noise.setdefault(name, (SignalToNoise(), SignalToNoise()))
        for sum_, state, other in zip(sums, states, rounded, strict=True):
            sum_.add(_tokens(state, batch), _tokens(other, batch))
        return rounded

    loss = run(observe, 0)
    scales = {name: dict(zip(_SCALES, (found / _LARGEST).tolist(), strict=True)) for name, found in largest.items()}
    _check_attention(scales, _WHERE)
    for name, entry in scales.items():
        _check(entry, f"{_WHERE}: {name}", TrainingError)
    take_cache_scales_(model, scales)
    rounded_loss = run(compare, len(held))
    decibels = {name: {"keys": sums[0].decibels, "values": sums[1].decibels} for name, sums in noise.items()}
    return KvCacheReport(scales, decibels, loss, rounded_loss)


def check_kv_cache(model: nn.Module, kv_cache: str, where: str) -> None:
    """Raise an error if `calibrate_kv_cache` does not support the model, before anything runs."""
    checked(kv_cache, Literal["fp8"], where, "kv_cache")
    generates = getattr(model, "can_generate", lambda: True)()  # transformers' encoders accept a cache, unused
    if not generates or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise CompatibilityError(
            where, f"kv_cache needs a decoder that generates text, got {type(model).__name__}", "drop it"
        )
    _check_attention(_attention_layers(model), where)


def _check_attention(layers: Mapping[str, Any], where: str) -> None:
    if not layers:
        raise CompatibilityError(
            where,
            "kv_cache needs attention layers that fill a cache (an argument cache or past_key_values), got none",
            "drop it",
        )


def cache_scales(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return attention layer → scales of its cache; empty if the model was not calibrated."""
    named = ((plain_name(name), vars(module).get("kv_cache_scales")) for name, module in model.named_modules())
    return {name: dict(entry) for name, entry in named if entry is not None}


def take_cache_scales_(model: nn.Module, ranges: Mapping[str, Any]) -> dict[str, Any]:
    """Set the cache scales among saved ranges on attention layers; return the ranges of other layers."""
    found = {name: entry for name, entry in ranges.items() if isinstance(entry, Mapping) and "k_scale" in entry}
    layers = _attention_layers(model) if found else {}
    for name, entry in found.items():
        if name not in layers:
            raise MatchError("apply_ranges", f"{name!r} is not an attention layer of the model{nearest(name, layers)}")
        _check(entry, f"apply_ranges: {name}", ConfigError)
        vars(layers[name])["kv_cache_scales"] = {scale: float(entry[scale]) for scale in _SCALES}
    return {name: entry for name, entry in ranges.items() if name not in found}


@contextlib.contextmanager
def rounding_kv_cache(model: nn.Module) -> Iterator[None]:
    """Return a context in which a model rounds keys and values to FP8, like an engine with an FP8 cache.

    A state s becomes ``scale · fp8(s / scale)``, in e4m3.

    Args:
        model: A model with scales, from `calibrate_kv_cache` or saved ones. Without scales, nothing is rounded.
    """
    scales = cache_scales(model)
    with _before_cache(model, lambda name, *states: _rounded(scales[name], *states) if name in scales else states):
        yield


def _check(entry: Mapping[str, Any], where: str, error: type[ConfigError | TrainingError]) -> None:
    for name in _SCALES:
        value = entry.get(name)
        if not isinstance(value, float) or not 0 < value < math.inf:
            what = "not all be 0" if value == 0 else "be finite"
            raise error(where, f"{'keys' if name == 'k_scale' else 'values'} must {what}, got a scale of {value}")


def _rounded(scales: Mapping[str, float], *states: Tensor) -> tuple[Tensor, ...]:
    def on_grid(state: Tensor, scale: float) -> Tensor:
        codes = (state.float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)  # a cast alone gives NaN
        return (codes.float() * scale).to(state.dtype)

    return tuple(on_grid(state, scales[name]) for name, state in zip(_SCALES, states, strict=True))


def _attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules whose forward takes a cache, which outer modules only pass on."""
    able = {name: module for name, module in model.named_modules() if _cache_argument(module)}
    modules = set(able.values())
    return {plain_name(name): module for name, module in able.items() if len(modules & {*module.modules()}) == 1}


def _cache_argument(module: nn.Module) -> str | None:
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


class _Cache:
    """Wraps a cache, or none, to change keys and values before they are stored."""

    def __init__(self, kept: Any, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.kept, self.change = kept, change

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values; return all that are stored."""
        keys, values = self.change(keys, values)
        return (keys, values) if self.kept is None else self.kept.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kept, name)


@contextlib.contextmanager
def _before_cache(model: nn.Module, change: Callable[..., Any]) -> Iterator[None]:
    """Call `change` with a layer's name, keys and values. The layer stores the result."""

    def hook(name: str, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        cache: Any = _cache_argument(module)
        bound.arguments[cache] = _Cache(bound.arguments.get(cache), functools.partial(change, name))
        return bound.args, bound.kwargs

    with contextlib.ExitStack() as stack:
        for name, module in _attention_layers(model).items():
            handle = module.register_forward_pre_hook(functools.partial(hook, name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _losses(
    model: nn.Module, batches: list[Any], progress: Callable[[int, int], None] | None, change: Any, done: int
) -> float | None:
    """Run the batches with `change` (batch, layer, keys, values) before the cache; return the mean token loss."""
    total, count = 0.0, 0
    for number, batch in enumerate(batches, 1):
        with evaluated(model), _before_cache(model, functools.partial(change, batch)):
            logits = getattr(call_model(model, batch, f"{_WHERE}: batches"), "logits", None)
        targets = _next_tokens(batch)
        if isinstance(logits, Tensor) and targets is not None and logits.shape[:-1] == targets.shape:
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"))
            count += int((targets != -100).sum())
        if progress is not None:
            progress(done + number, 2 * len(batches))
    return total / count if count else None


def _next_tokens(batch: Any) -> Tensor | None:
    """Return the next token per position, -100 where unknown."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    given = batch if isinstance(batch, Mapping) else {"input_ids": first}
    tokens = given.get("labels", given.get("input_ids"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        return None
    mask = given.get("attention_mask")
    tokens = tokens if mask is None or mask.shape != tokens.shape else tokens.masked_fill(mask == 0, -100)
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


def _tokens(states: Tensor, batch: Any) -> Tensor:
    """Return the states (batch, heads, tokens, width) of tokens other than padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (states.shape[0], states.shape[2]):
        return states
    return states.transpose(1, 2)[mask.bool()]
