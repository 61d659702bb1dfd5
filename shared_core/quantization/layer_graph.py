"""Find which layer follows which, by tracing with torch.fx or observing one forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shared_core.errors import CompatibilityError, ConfigError, MatchError, in_short, nearest
from shared_core.modules.calls import call_model, evaluated
from shared_core.modules.like_stock import stock_kind, why_not_float
from shared_core.modules.weight_views import CONVOLUTIONS

LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
"""Layers that can be in a chain. A subclass can if `stock_kind` takes it for one of them."""

# these read metadata, not values
_METADATA = frozenset(
    """
    size dim ndim shape device dtype numel is_floating_point is_cuda layout requires_grad grad_fn stride names
    is_contiguous is_sparse is_quantized is_nested is_meta is_complex element_size ndimension get_device __len__
    __hash__ __repr__ __format__ _version data_ptr storage_offset is_leaf is_inference is_mps is_xpu is_cpu
    """.split()  # noqa: SIM905
)


@dataclass
class Node:
    """One call in the flow.

    Attributes:
        label: The module's name, the function's name, ``"input"`` or ``"output"``.
        module: The module that was called; None for a function.
        args: Positional arguments other than tensors, for a function.
        kwargs: Keyword arguments other than tensors, for a function.
        inputs: Nodes whose values it reads, in order.
        users: Nodes that read its value, one entry per read.
        shape: Shape of its value, if a forward was observed.
    """

    label: str
    module: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: list[Node] = field(default_factory=list, repr=False)
    users: list[Node] = field(default_factory=list, repr=False)
    shape: torch.Size | None = None

    @property
    def kind(self) -> str:
        """The type of the module, or the name of the function."""
        return self.label if self.module is None else type(self.module).__name__

    def __str__(self) -> str:
        return self.label if self.module is None else f"{type(self.module).__name__} {self.label!r}"


class Flow:
    """The calls of one forward in order, and which modules a chain cannot describe."""

    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self.names = {id(module): name for name, module in model.named_modules()}
        self.calls: dict[str, list[Node]] = {}
        self.read_outside: dict[str, str] = {}
        self._tied: dict[str, str] = {}
        owners: dict[int, str] = {}
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    # A parameter under two names belongs to two layers, and rescaling one changes the other.
                    other = owners.setdefault(id(parameter), name)
                    if other != name:
                        self._tied[name], self._tied[other] = other, name
        self._owners = owners

    def add(self, label: str, inputs: list[Node], module: nn.Module | None = None, **details: Any) -> Node:
        """Append a call that reads `inputs`."""
        node = Node(label, module, inputs=inputs, **details)
        for source in inputs:
            source.users.append(node)
        self.nodes.append(node)
        if module is not None:
            self.calls.setdefault(label, []).append(node)
        return node

    def read(self, parameter_id: int, reader: str) -> None:
        """Record that code outside a module reads one of its parameters."""
        if parameter_id in self._owners:
            self.read_outside[self._owners[parameter_id]] = reader

    def why_not(self, node: Node) -> str | None:
        """Return why a layer's or batch norm's parameters must stay as they are; None if they may be changed."""
        if node.module is None:
            return f"{node} is a function, not a module"
        name, module = node.label, node.module
        if len(self.calls[name]) > 1:
            return f"it is called {len(self.calls[name])} times in one forward"
        if name in self._tied:
            return f"its parameters are tied to those of {self._tied[name]!r}"
        if name in self.read_outside:
            return f"{self.read_outside[name]} reads its parameters without calling it"
        if module._forward_hooks or module._forward_pre_hooks:
            return "a forward hook may change its input or output"
        weight = module._parameters.get("weight")
        if weight is None and not isinstance(module, LAYERS):
            return None
        return why_not_float([] if weight is None else [weight])


def sole_user(node: Node) -> tuple[Node | None, str]:
    """Return (the only reader of a value, ""), or (None, the reason) if there is no single reader."""
    if len(node.users) == 1:
        return node.users[0], ""
    if not node.users:
        return None, "nothing reads its output"
    readers = ", ".join(str(user) for user in node.users)
    return None, f"its output has several readers (a residual or a second branch): {readers}"


def chosen_layers(
    able: Mapping[str, nn.Module], names: Sequence[str] | None, kind: str, where: str
) -> dict[str, nn.Module]:
    """Return the named layers in the order of `names`, or all if `names` is None."""
    for name in names or ():
        if name not in able:
            raise MatchError(where, f"{name!r} is not a {kind}{nearest(name, able)}")
    chosen = dict(able) if names is None else {name: able[name] for name in names}
    if not chosen:
        raise MatchError(where, f"must match at least one {kind}, got none")
    return chosen


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of a model's output: itself, its ``logits``, or the first tensor in it."""
    for found in (output, getattr(output, "logits", None), *tree_leaves(output)):
        if isinstance(found, Tensor):
            return found
    raise ConfigError(
        "output", f"must hold a tensor, got {type(output).__name__}", "wrap the model in one that returns a tensor"
    )


def trace(model: nn.Module, example_inputs: Any = None, *, where: str = "trace") -> Flow:
    """Return the flow of values through `model`.

    With example inputs, one forward is observed. This works for every model that runs, and follows the branches that
    these inputs take. Without them, torch.fx traces the code symbolically, which fails if
    the code reads values or shapes, as Hugging Face models do. torch.export is not used, because it flattens
    modules into aten calls on lifted parameters and refuses more models.

    Args:
        model: Any module; it is not changed.
        example_inputs: A tensor, a tuple of arguments, or a mapping of keyword arguments; None: torch.fx.
        where: The caller, for errors.

    Example:
        >>> flow = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        >>> [str(node) for node in flow.nodes]
        ['input', "Linear '0'", "ReLU '1'", 'output']
    """
    if example_inputs is None:
        return _trace_symbolically(model, where)
    return _observe(model, example_inputs, where)


def _is_leaf(module: nn.Module) -> bool:
    # peft's layers branch on values; a user's class that computes a stock layer or a batch norm is one step of the flow
    if hasattr(module, "get_base_layer") or isinstance(module, _BatchNorm) or stock_kind(type(module)) is not None:
        return True
    # of transformers' activations, which some compute from tanh, the name says what they are
    is_known = type(module).__module__.startswith(("torch.nn", "transformers.activations"))
    return is_known and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


class _LeafTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m)


def _trace_symbolically(model: nn.Module, where: str) -> Flow:
    # the tracer would trace into a root that is a layer
    root = nn.Sequential(model) if _is_leaf(model) else model
    try:
        graph = _LeafTracer().trace(root)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        raise CompatibilityError(
            where,
            f"torch.fx cannot trace {type(model).__name__} ({in_short(error)})",
            "pass example_inputs",
        ) from error
    flow, made = Flow(model), dict[fx.Node, Node]()
    modules = dict(root.named_modules(remove_duplicate=False))
    parameters = dict(root.named_parameters(remove_duplicate=False))
    for entry in graph.nodes:
        sources = [made[source] for source in _fx_sources(entry) if source in made]
        label = "input" if entry.op == "placeholder" else _function_name(entry.target)
        if entry.op == "get_attr":
            if entry.target in parameters:
                readers = ", ".join(_function_name(user.target) for user in entry.users)
                flow.read(id(parameters[entry.target]), readers or "the model")
            continue
        if entry.op == "call_module":
            module = modules[entry.target]
            made[entry] = flow.add(flow.names[id(module)], sources, module)
        elif label not in _METADATA and not (label == "getattr" and entry.args[1] in _METADATA):
            arguments = tuple(value for value in entry.args if not isinstance(value, fx.Node))
            options = {key: value for key, value in entry.kwargs.items() if not isinstance(value, fx.Node)}
            made[entry] = flow.add(label, sources, args=arguments, kwargs=options)
    return flow


def _fx_sources(entry: fx.Node) -> list[fx.Node]:
    """List every read: fx itself lists ``x + x`` once."""
    found: list[fx.Node] = []
    fx.map_arg((entry.args, entry.kwargs), lambda node: found.append(node))
    return found


def _function_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


class _Recorder(TorchFunctionMode):
    """Record calls of leaf modules and, outside of them, every torch function on tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flow = Flow(model)
        self._made: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # so that no id is reused
        self._inside = 0
        self._parameters = {id(parameter) for parameter in model.parameters()}

    def produce(self, value: Any, node: Node) -> None:
        for tensor in _tensors(value):
            if id(tensor) not in self._parameters:
                self._made[id(tensor)] = node
                self._alive.append(tensor)
                node.shape = tensor.shape

    def sources(self, value: Any) -> list[Node]:
        return [self._made[id(tensor)] for tensor in _tensors(value) if id(tensor) in self._made]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        label = _function_name(func)
        if label == "__get__":
            label = _function_name(getattr(func, "__self__", label))
        # Torch calls inside a leaf module are not part of the flow.
        if self._inside or label in _METADATA:
            return result
        sources = self.sources((args, kwargs))
        # A parameter is read outside its module's forward, as by F.linear for a tied projection.
        for tensor in _tensors((args, kwargs)):
            self.flow.read(id(tensor), label)
        if sources:
            arguments = tuple(value for value in args if not isinstance(value, Tensor))
            options = {key: value for key, value in kwargs.items() if not isinstance(value, Tensor)}
            self.produce(result, self.flow.add(label, sources, args=arguments, kwargs=options))
        return result

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inside -= 1
        if not self._inside:
            node = self.flow.add(self.flow.names[id(module)], self.sources((args, kwargs)), module)
            self.produce(output, node)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors(vars(leaf))
    return found


def _observe(model: nn.Module, example_inputs: Any, where: str) -> Flow:
    recorder = _Recorder(model)
    recorder.produce(example_inputs, recorder.flow.add("input", []))
    hooks = []
    for module in model.modules():
        if _is_leaf(module):
            hooks.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
    try:
        with evaluated(model), recorder:
            output = call_model(model, example_inputs)
    except Exception as error:  # the user's code may raise anything
        raise CompatibilityError(
            where,
            f"the model does not run on example_inputs: it raised {type(error).__name__}: {error}",
            "pass a tensor, a tuple of arguments or a mapping of keyword arguments",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    recorder.flow.add("output", recorder.sources(output))
    return recorder.flow
