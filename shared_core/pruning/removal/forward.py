"""One forward of a model, followed or not, and what its output is judged by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from shared_core.model_calls import call as call
from shared_core.model_calls import evaluated
from shared_core.pruning.removal.trace import Tracer

_BY_PRODUCTS = ("past_key_values", "hidden_states", "attentions", "encoder_", "decoder_", "cross_attentions")


def run(model: nn.Module, example_inputs: Any, *, constants: bool) -> Tracer:
    """Return the tracer after one forward in eval mode without gradients.

    The model's modes are restored, and nothing of it is changed.
    """
    tracer = Tracer(model, constants=constants)
    leaves = [] if callable(example_inputs) else tree_leaves(dict(_named_inputs(example_inputs)))
    tracer.inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
    with evaluated(model), decomposed(), _hooked(model, tracer), tracer:
        out = call(model, example_inputs)
    for name, tensor in outputs_of(out):
        tracer.pin(tensor, f"it is an output of the model{f' ({name})' if name else ''}")
    return tracer


def _named_inputs(example_inputs: Any) -> Mapping[Any, Any]:
    return example_inputs if isinstance(example_inputs, Mapping) else {0: example_inputs}


def outputs_of(output: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return names and tensors that an output is judged by: logits and loss, or else all but by-products.

    Example:
        >>> [name for name, _ in outputs_of({"logits": torch.ones(2), "hidden_states": torch.ones(3)})]
        ['logits']
    """
    if isinstance(output, Tensor):
        return [(name, output)]
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        only = [key for key in ("logits", "loss") if output.get(key) is not None]
        named = {str(key): value for key, value in output.items()}
        keys = only or [key for key in named if not key.startswith(_BY_PRODUCTS)]
        return [found for key in keys for found in outputs_of(named[key], key)]
    if isinstance(output, tuple | list):
        return [found for value in output for found in outputs_of(value, name)]
    return [(name, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


@contextmanager
def decomposed() -> Iterator[None]:
    """Have attention and compiled modules run as the operators they are made of."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _hooked(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    handles = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: tracer.module_names.append(name)

    def leave(*_: Any) -> None:
        tracer.module_names.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
