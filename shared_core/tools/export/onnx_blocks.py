"""Repeated blocks of a model, such as encoder layers: traced once, written for each occurrence.

torch.export and the passes of torch.onnx take time per operation, and a deep model is mostly one block repeated. In
one trace the first block's operations are recorded from placeholders of its inputs, and each call of a block is one
node. Then each node is replaced by the operations, with its block's parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shared_core.modules.calls import call_model

_DOMAIN, _BLOCK, _START = "efftrain", "Block", "Start"
_OWN = ("_parameters", "_buffers", "_modules")
_FEWEST = 3  # two traces, of the block and of the rest, take as long as two blocks
# A block's own index among the others.
_PLACES = frozenset({"layer_idx", "layer_id"})


@dataclasses.dataclass
class _Call:
    """The call of a block while the model is traced."""

    leaves: list[Any]
    spec: Any

    def named(self) -> _Call:
        """Return the same with final symbol names: while tracing, equal axes have separate symbols."""
        leaves = [(x[0], tuple(map(str, x[1]))) if isinstance(x, tuple) else x for x in self.leaves]
        return _Call(leaves, self.spec)


def repeated_blocks(model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
    """Return groups of blocks that differ only in their parameters: name of each → the structure of its output.

    Blocks are children of a `ModuleList` or `Sequential`, called once, that return one tensor with the shape of their
    first input. A forward that reads its block's index (``layer_idx``) excludes them.
    """
    likely: dict[str, list[str]] = defaultdict(list)
    for parent_name, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            for key, child in parent.named_children():
                if "forward" in vars(child):  # a user's own, which ours would replace
                    continue
                likely[_signature(child)].append(f"{parent_name}.{key}".removeprefix("."))
    many = [names for names in likely.values() if len(names) >= _FEWEST]
    outputs: dict[str, list[Any]] = {name: [] for names in many for name in names}
    blocks = {name: model.get_submodule(name) for name in outputs}
    for names in many:
        first: list[Any] = []
        for name in names:
            blocks[name].forward = _recorded(blocks[name].forward, outputs[name], first)
    # Hide the index meanwhile: blocks that compute with it are not equal.
    modules = {module for block in blocks.values() for module in block.modules()}
    places = [(module, key, vars(module).pop(key)) for module in modules for key in _PLACES & vars(module).keys()]
    try:
        with torch.no_grad():
            call_model(model, inputs)
    except Exception:  # the model fails without it; it is then traced as a whole
        return []
    finally:
        for module, key, place in places:
            setattr(module, key, place)
        for block in blocks.values():
            vars(block).pop("forward", None)  # one that stands in two places has lost it already
    groups: list[dict[str, Any]] = []
    for names in many:
        # named_modules has a block before those within it, which go with it
        outer = tuple(f"{name}." for group in groups for name in group)
        group = {name: outputs[name][0] for name in names if len(outputs[name]) == 1 and not name.startswith(outer)}
        if len(group) >= _FEWEST and all(output is not None for output in group.values()):
            groups.append(group)
    return groups


def _signature(block: nn.Module) -> Any:
    """Return what two blocks must share to be one graph with other parameters."""
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
    """Return a key that tells values apart: plain values themselves, otherwise the object's identity."""
    if isinstance(value, dict):
        return [(_plain(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    return repr(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else id(value)


def _recorded(run: Callable[..., Any], seen: list[Any], first: list[Any]) -> Callable[..., Any]:
    """Return a block's forward that records its outputs' structure in `seen`, None if the block does not qualify."""
    # `first`: the arguments of the group's first block, and the structure of its output. A block with equal arguments
    # does not run: only structures matter.

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = [(x.shape, x.dtype) for x in given]
        if first and first[0] == kinds:
            seen.append(first[1])
            return _like(first[1], given[0])
        output = run(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        made = [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        fits = bool(given) and made == kinds[:1]
        seen.append((leaves, spec) if fits else None)
        if fits and not first:
            first.extend((kinds, seen[-1]))
        return output

    return forward


def _like(output: tuple[list[Any], Any], value: Tensor) -> Any:
    """Return an output of this structure with `value` as its tensor."""
    leaves, spec = output
    return tree_unflatten([value if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _node(number: int, name: str, output: tuple[list[Any], Any], calls: dict[str, _Call], inside: Any) -> Any:
    """Return a block's forward during tracing: one node."""
    # `inside`: the forward of the block to trace, from placeholders of the node's inputs to its last input.

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        known = [(leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        calls[name] = _Call(known, spec)
        given = list(tensors)
        if inside is not None:
            starts = iter([_symbolic(_START, [x], {"name": name, "place": i}) for i, x in enumerate(tensors)])
            alike = [next(starts) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own_args, own_kwargs = tree_unflatten(alike, spec)
            made = tree_leaves(inside(*own_args, **own_kwargs))
            given += [leaf for leaf in made if isinstance(leaf, Tensor)]
        return _like(output, _symbolic(f"{_BLOCK}{number}", given, {"name": name}))

    return forward


def _symbolic(kind: str, tensors: list[Tensor], attributes: dict[str, Any]) -> Tensor:
    """Return a node's output, which has the shape of its first input."""
    like = tensors[0]
    y: Tensor = torch.onnx.ops.symbolic(
        f"{_DOMAIN}::{kind}", tensors, attributes, dtype=like.dtype, shape=like.shape, version=1
    )
    return y


def _alike(calls: list[_Call]) -> bool:
    """Return True if all calls have equal tensors and plain values."""
    first = calls[0].named()
    plain = all(isinstance(leaf, tuple | None | bool | int | float | str) for leaf in first.leaves)
    return plain and all(call.named() == first for call in calls)


@contextlib.contextmanager
def _one_of_each(model: nn.Module, groups: list[dict[str, Any]], calls: dict[str, _Call]) -> Iterator[None]:
    """Trace only the first block of each group; the others become nodes without parameters."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    blocks = [[model.get_submodule(name) for name in group] for group in groups]
    try:
        for number, (group, members) in enumerate(zip(groups, blocks, strict=True)):
            for block, (name, output) in zip(members, group.items(), strict=True):
                first = block is members[0]
                forward = _node(number, name, output, calls, block.forward if first else None)
                if not first:
                    kept.append((block, {key: vars(block)[key] for key in _OWN}))
                    vars(block).update({key: {} for key in _OWN})
                block.forward = forward
        yield
    finally:
        for block in itertools.chain(*blocks):
            vars(block).pop("forward", None)
        for block, own in kept:
            vars(block).update(own)


def export_around_blocks(model: nn.Module, groups: list[dict[str, Any]], export: Callable[..., Any]) -> Any | None:
    """Return the ONNX program with repeated blocks traced once; None if they are called differently."""
    from onnx_ir.passes.common import (
        CommonSubexpressionEliminationPass,
        InlinePass,
        RemoveUnusedNodesPass,
        RemoveUnusedOpsetsPass,
    )
    from onnxscript import optimizer

    calls: dict[str, _Call] = {}
    with _one_of_each(model, groups, calls):
        program = export()
    if not all(_alike([calls[name] for name in group]) for group in groups):
        return None
    functions = [_take_out(program.model, number, next(iter(group)), model) for number, group in enumerate(groups)]
    RemoveUnusedNodesPass()(program.model)
    program.optimize()
    # After that: inlining first would optimize every block separately.
    for function in functions:
        program.model.functions[function.identifier()] = function
    InlinePass()(program.model)
    optimizer.fold_constants(program.model)  # what is computed of a block's parameters, such as transposed codes
    for one in (CommonSubexpressionEliminationPass(), RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass()):
        one(program.model)
    return program


def _take_out(program: Any, number: int, first: str, model: nn.Module) -> Any:
    """Return the nodes of the block traced as a function. Each block's node then takes its own parameters."""
    import onnx_ir
    from onnxscript import optimizer

    graph, kind = program.graph, f"{_BLOCK}{number}"
    sites = {node.attributes.pop("name").as_string(): node for node in graph if node.op_type == kind}
    num_inputs = len(sites[first].inputs) - 1
    end = sites[first].inputs[-1]
    sites[first].resize_inputs(num_inputs)
    own = {id(value): key for key, value in _tensors(model.get_submodule(first))}
    keys = {name: own[id(value)] for name, value in _tensors(model) if id(value) in own}
    starts, around = _bounds(graph, first, end)
    outer = [*around, *(value for name, value in graph.initializers.items() if name in keys)]
    body = onnx_ir.convenience.extract(graph, [*starts.values(), *outer], [end])
    # Parameters are inputs before the graph is optimized. Otherwise one block's constants (a bias of zeros) would
    # end up in all.
    for value in body.inputs:
        body.initializers.pop(str(value.name), None)
        value.const_value = None
    for place in sorted({*range(num_inputs)} - {*starts}):
        body.inputs.insert(place, onnx_ir.val(f"unused_{place}"))
    optimizer.optimize(onnx_ir.Model(body, ir_version=program.ir_version))
    constants = []
    for name, value in tuple(body.initializers.items()):
        constants.append(_initializer(graph, f"{kind}.{name}", body.initializers.pop(name).const_value))
        body.inputs.append(value)
    for name, node in sites.items():
        tensors = dict(_tensors(model.get_submodule(name)))
        node.resize_inputs(num_inputs + len(outer) + len(constants))
        for place, value in enumerate((*outer, *constants), num_inputs):
            key = keys.get(value.name)
            node.replace_input_with(place, value if key is None else _initializer(graph, f"{name}.{key}", tensors[key]))
    return onnx_ir.Function(_DOMAIN, kind, graph=body, attributes=())


def _bounds(graph: Any, block: str, end: Any) -> tuple[dict[int, Any], list[Any]]:
    """Return the placeholders of a block's inputs by position, and its other inputs, such as an axis's length."""
    starts: dict[int, Any] = {}
    of_model, of_block = set(graph.inputs), set()
    for node in graph:
        if (node.domain, node.op_type) == (_DOMAIN, _START) and node.attributes["name"].as_string() == block:
            starts[node.attributes["place"].as_int()] = node.outputs[0]
            of_block.add(node.outputs[0])
        elif not of_block.isdisjoint(node.inputs):
            of_block.update(node.outputs)
        elif not of_model.isdisjoint(node.inputs):
            of_model.update(node.outputs)
    around: list[Any] = []
    seen, left = set(starts.values()), [end]
    while left:
        value = left.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        if value in of_model:
            around.append(value)
        elif value.producer() is not None:
            left += value.producer().inputs
    return starts, around


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _initializer(graph: Any, name: str, value: Any) -> Any:
    import onnx_ir
    from onnx_ir import tensor_adapters

    if name not in graph.initializers:
        constant = tensor_adapters.TorchTensor(value.detach(), name=name) if isinstance(value, Tensor) else value
        graph.register_initializer(onnx_ir.val(name, const_value=constant))
    return graph.initializers[name]
