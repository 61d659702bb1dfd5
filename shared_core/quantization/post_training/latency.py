"""Time a model on one batch, in float, in bf16, and as each quantised form of it."""

from __future__ import annotations

import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shared_core.errors import EffError
from shared_core.modules.calls import call_model
from shared_core.quantization.batch_norm import run
from shared_core.quantization.integer.convert import convert


def latencies(model: nn.Module, quantized: nn.Module, example_inputs: Any, *, repeats: int = 15) -> dict[str, float]:
    """Return milliseconds of CPU time for one forward: of the float model, in bf16, and of the quantised model's forms.

    One thread, `time.process_time`, the median of `repeats` rounds in which the forms take turns, after one round that
    is not counted. ``int8 reference`` is `convert`'s exact model, not made to be fast; ``torchao`` its kernels, where
    torchao is installed. A form that cannot run is left out.

    Example:
        >>> from shared_core.quantization import quantize
        >>> net = nn.Linear(8, 4)
        >>> sorted(latencies(net, quantize(net, "int8_dynamic"), torch.ones(2, 8), repeats=1))[:2]
        ['bfloat16', 'float32']
    """
    run(model, example_inputs, "latencies: example_inputs")  # below, a form that cannot run is left out
    narrow = tree_map(_to_bf16, example_inputs)
    makers: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "float32": (lambda: model, example_inputs),
        "bfloat16": (lambda: copy.deepcopy(model).to(torch.bfloat16), narrow),
        "int8 reference": (lambda: convert(quantized), example_inputs),
    }
    if importlib.util.find_spec("torchao") is not None:
        makers["torchao"] = (lambda: convert(quantized, backend="torchao"), example_inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        forms = {name: form for name, (make, inputs) in makers.items() if (form := _form(make, inputs)) is not None}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(repeats):
            for name, forward in forms.items():
                start = time.process_time()
                forward()
                times[name].append(1e3 * (time.process_time() - start))
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(found) for name, found in times.items()}


def _form(make: Callable[[], nn.Module], inputs: Any) -> Callable[[], Any] | None:
    @torch.no_grad()
    def forward() -> Any:
        return call_model(made, inputs)

    try:
        made = make().eval()
        forward()
    except (EffError, RuntimeError, NotImplementedError, TypeError):  # this form has no kernel for it here
        return None
    return forward


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value
