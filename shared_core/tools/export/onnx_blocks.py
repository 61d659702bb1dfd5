"""Blocks that a model repeats, such as the layers of an encoder: traced once, written as often as they occur.

torch.export and the passes of torch.onnx take a time for each operation, and a deep model is mostly one block many
times. The model is exported around its blocks, a block for itself, and its graph is put in where the model calls it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from shared_core.modules.calls import call_model

_DOMAIN = "efftrain"
_FEWEST = 3  # two traces, of the block and of the rest, take as long as two blocks
# A block's own place among the others.
_PLACES = frozenset({"layer_idx", "layer_id"})


@dataclasses.dataclass
class _Call:
    """The call of a block while the model is traced.

    Attributes:
        leaves: Its arguments, flattened; of a tensor its type and its axes: sizes, or the names of open ones.
        spec: Their structure.
    """

    leaves: list[Any]
    spec: Any

    def tensors(self) -> list[_Axes]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Axes)]


@dataclasses.dataclass
class _Axes:
    dtype: torch.dtype
    sizes: tuple[int | str, ...]


class _Block(nn.Module):
    """A block that takes its tensors and returns its tensor."""

    def __init__(self, block: nn.Module, call: _Call) -> None:
        super().__init__()
        self.block = block
        self.known = call

    def forward(self, *tensors: Tensor) -> Any:
        """Return the block's tensor."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, _Axes) else leaf for leaf in self.known.leaves]
        args, kwargs = tree_unflatten(leaves, self.known.spec)
        return next(leaf for leaf in tree_leaves(self.block(*args, **kwargs)) if isinstance(leaf, Tensor))


def repeated_blocks(model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
    """Return groups of blocks that differ in their parameters alone: name of each → the structure of its output.

    Blocks are children of a `ModuleList` or `Sequential`, called once, that return one tensor, shaped as their first.
    There are none where a forward reads its block's place (``layer_idx``).

    Args:
        model: In evaluation.
        inputs: As `call_model` takes them.
    """
    likely: dict[str, list[str]] = defaultdict(list)
    for parent_name, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            for key, child in parent.named_children():
                likely[_signature(child)].append(f"{parent_name}.{key}".removeprefix("."))
    many = [names for names in likely.values() if len(names) >= _FEWEST]
    outputs: dict[str, list[Any]] = {name: [] for names in many for name in names}
    hooks = [
        model.get_submodule(name).register_forward_hook(_record(seen), with_kwargs=True)
        for name, seen in outputs.items()
    ]
    # Taken away meanwhile, for blocks that compute with their place are not alike.
    modules = {module for name in outputs for module in model.get_submodule(name).modules()}
    places = [(module, key, vars(module).pop(key)) for module in modules for key in _PLACES & vars(module).keys()]
    try:
        with torch.no_grad():
            call_model(model, inputs)
    except Exception:  # whatever the model raises without them; with them it is traced as a whole, and raises then
        return []
    finally:
        for module, key, place in places:
            setattr(module, key, place)
        for hook in hooks:
            hook.remove()
    groups: list[dict[str, Any]] = []
    for names in many:
        # named_modules has a block before those within it, which go with it
        outer = tuple(f"{name}." for group in groups for name in group)
        group = {name: outputs[name][0] for name in names if len(outputs[name]) == 1 and not name.startswith(outer)}
        if len(group) >= _FEWEST and all(output is not None for output in group.values()):
            groups.append(group)
    return groups


def _signature(block: nn.Module) -> Any:
    """Return what two blocks must have in common to be one graph with other parameters."""
    found: list[Any] = []
    for name, module in block.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key not in _PLACES}
        for kind in ("_parameters", "_buffers"):
            attributes[kind] = [
                (key, None if value is None else (tuple(value.shape), value.dtype))
                for key, value in attributes[kind].items()
            ]
        attributes["_modules"] = list(attributes["_modules"])
        found.append((name, type(module), [(key, _plain(value)) for key, value in sorted(attributes.items())]))
    return repr(found)


def _plain(value: Any) -> Any:
    """Return what tells values apart: themselves if they are plain, else the object's identity."""
    if isinstance(value, dict):
        return [(_plain(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    return repr(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else id(value)


def _record(seen: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        leaves, spec = tree_flatten(output)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fits = bool(given) and [(x.shape, x.dtype) for x in made] == [(given[0].shape, given[0].dtype)]
        seen.append((leaves, spec) if fits else None)

    return hook


def _node(number: int, name: str, output: tuple[list[Any], Any], calls: dict[str, _Call]) -> Callable[..., Any]:
    """Return what a block's forward is while the model is traced: one node."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        calls[name] = _Call(
            [
                _Axes(leaf.dtype, tuple(size if isinstance(size, int) else str(size) for size in leaf.shape))
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ],
            spec,
        )
        y = torch.onnx.ops.symbolic(
            f"{_DOMAIN}::Block{number}",
            tensors,
            {"name": name},
            dtype=tensors[0].dtype,
            shape=tensors[0].shape,
            version=1,
        )
        return tree_unflatten([y if isinstance(leaf, Tensor) else leaf for leaf in output[0]], output[1])

    return forward


def _names_of(axes: dict[str, str], shapes: Any) -> Callable[..., None]:
    """Return a hook that finds what the open axes of a model's inputs are called: symbol of the trace → name."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        for path, value in tree_flatten_with_path(kwargs or args)[0] if shapes else ():
            found = shapes
            for key in path:
                found = key.get(found)
            # Equal axes have a symbol each, until an operation needs them to be equal.
            axes.update({str(value.shape[axis]): dim.__name__ for axis, dim in (found or {}).items()})

    return hook


def _arguments(calls: list[_Call], axes: dict[str, str]) -> tuple[tuple[Tensor, ...], dict[str, Any], Any] | None:
    """Return arguments, keyword arguments and open axes to export a block with; None if not all are called alike."""
    call = calls[0]
    plain = all(isinstance(leaf, _Axes | None | bool | int | float | str) for leaf in call.leaves)
    # An axis that is computed from others has no name.
    named = all(size in axes for x in call.tensors() for size in x.sizes if isinstance(size, str))
    if not plain or not named or any(one != call for one in calls):
        return None
    dims = {name: torch.export.Dim(name) for name in sorted(set(axes.values()))}
    # Lengths that no other axis has by chance; torch.export takes a length of 1 for a constant.
    lengths = dict(zip(dims, (5, 7, 11, 13), strict=False))
    shapes = tuple(
        {axis: dims[axes[size]] for axis, size in enumerate(x.sizes) if isinstance(size, str)} for x in call.tensors()
    )
    examples = tuple(
        torch.zeros([lengths[axes[size]] if isinstance(size, str) else size for size in x.sizes], dtype=x.dtype)
        for x in call.tensors()
    )
    return examples, {}, (shapes,)


def export_around_blocks(
    model: nn.Module, shapes: Any, groups: list[dict[str, Any]], whole: Callable[[], Any], export: Callable[..., Any]
) -> Any | None:
    """Return the ONNX program of a model whose repeated blocks are traced once; None if they are called otherwise.

    Args:
        model: As it is exported.
        shapes: Which axes of its inputs stay open.
        groups: Of `repeated_blocks`.
        whole: Exports the model as it is.
        export: Exports a module for its arguments, keyword arguments and open axes.
    """
    from onnx_ir.passes.common import (
        CommonSubexpressionEliminationPass,
        InlinePass,
        RemoveUnusedNodesPass,
        RemoveUnusedOpsetsPass,
    )
    from onnxscript import optimizer

    calls: dict[str, _Call] = {}
    axes: dict[str, str] = {}
    watch = model.register_forward_pre_hook(_names_of(axes, shapes), with_kwargs=True)
    try:
        for number, group in enumerate(groups):
            for name, output in group.items():
                model.get_submodule(name).forward = _node(number, name, output, calls)
        program = whole()
    finally:
        watch.remove()
        for name in itertools.chain(*groups):
            del model.get_submodule(name).forward
    for number, group in enumerate(groups):
        found = _arguments([calls[name] for name in group], axes)
        if found is None:
            return None
        first = next(iter(group))
        block = _Block(model.get_submodule(first), calls[first])
        _put_in(program.model, f"Block{number}", export(block, *found, optimize=False).model, model)
    InlinePass()(program.model)
    optimizer.fold_constants(program.model)  # what is computed of a block's parameters, such as transposed codes
    for one in (CommonSubexpressionEliminationPass(), RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass()):
        one(program.model)
    return program


def _put_in(program: Any, kind: str, traced: Any, model: nn.Module) -> None:
    """Make a block's graph a function of the program, and each of its nodes a call with its own parameters."""
    import onnx_ir
    from onnxscript import optimizer

    graph = traced.graph
    # Inputs before the graph is optimised, or what one block has by chance (a bias of zeros) went into all.
    shared = {}
    for value in tuple(graph.initializers.values()):
        shared[value.name.removeprefix("block.")] = graph.initializers.pop(value.name).const_value
        value.const_value = None
        graph.inputs.append(value)
    optimizer.optimize(traced)
    for value in tuple(graph.initializers.values()):
        shared[value.name] = graph.initializers.pop(value.name).const_value
        graph.inputs.append(value)
    function = onnx_ir.Function(_DOMAIN, kind, graph=graph, attributes=())
    program.functions[function.identifier()] = function
    for node in program.graph:
        if (node.domain, node.op_type) == (_DOMAIN, kind):
            name, place = node.attributes.pop("name").as_string(), len(node.inputs)
            block = model.get_submodule(name)
            own = dict(
                itertools.chain(
                    block.named_parameters(remove_duplicate=False), block.named_buffers(remove_duplicate=False)
                )
            )
            node.resize_inputs(place + len(shared))
            for key, constant in shared.items():
                # What is no parameter is a constant that all blocks have.
                value = (f"{name}.{key}", own[key]) if key in own else (f"{kind}.{key}", constant)
                node.replace_input_with(place, _initializer(program.graph, *value))
                place += 1


def _initializer(graph: Any, name: str, value: Any) -> Any:
    import onnx_ir
    from onnx_ir import tensor_adapters

    if name not in graph.initializers:
        constant = tensor_adapters.TorchTensor(value.detach(), name=name) if isinstance(value, Tensor) else value
        graph.register_initializer(onnx_ir.val(name, const_value=constant))
    return graph.initializers[name]
