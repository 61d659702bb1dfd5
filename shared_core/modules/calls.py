"""Run a model on example inputs in any form, in evaluation mode and without a key-value cache.

Also hook and record the calls of one micro-batch for tracing, and solve linear layers one decoder block at a time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shared_core.errors import ConfigError, EffError, TrainingError
from shared_core.modules.matching import is_transformers_conv1d


class RunHook:
    """A hook that does nothing in a copied or pickled module, since the run belongs to the original.

    Args:
        hook: The hook, None for one that does nothing.

    Example:
        >>> import copy
        >>> from torch import nn
        >>> layer = nn.Identity()
        >>> handle = layer.register_forward_hook(RunHook(lambda module, args, output: output + 1))
        >>> layer(1), copy.deepcopy(layer)(1)
        (2, 1)
    """

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return None if self._hook is None else self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunHook, (None,)


def remove_hooks(handles: list[Any]) -> None:
    """Remove the hooks of these handles, and empty the list."""
    while handles:
        handles.pop().remove()


def around_forwards(
    model: nn.Module, surrounding: Callable[[nn.Module, Any, Any], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """Enter a context manager around each training forward of a model, until the returned function is called.

    Args:
        model: The model.
        surrounding: Makes it from the model and the forward's arguments, positional and named.
    """
    entered: list[AbstractContextManager[Any]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        trains = module.training and torch.is_grad_enabled()
        around = surrounding(module, args, kwargs) if trains else contextlib.nullcontext()
        around.__enter__()
        entered.append(around)

    def after(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handles = [
        model.register_forward_pre_hook(RunHook(before), with_kwargs=True, prepend=True),
        model.register_forward_hook(RunHook(after), always_call=True),
    ]
    return functools.partial(remove_hooks, handles)


def call(model: nn.Module, example_inputs: Any) -> Any:
    """Call a model with a tensor, a tuple or a mapping of arguments, or call a function; return the result."""
    if callable(example_inputs):
        return example_inputs()
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    return model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)


def call_model(
    model: nn.Module, inputs: Any, where: str = "model: inputs", remedy: str = "give them without labels"
) -> Any:
    """Return the model's output, as `call` does."""
    with naming(inputs, where, remedy):
        return call(model, inputs)


@contextmanager
def naming(inputs: Any, where: str, remedy: str) -> Iterator[None]:
    """Wrap the call of a user's model, so that its errors name the inputs."""
    try:
        yield
    except (EffError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        names = f" of {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else ""
        raise ConfigError(
            f"{where} must hold what the model takes: a tensor, a tuple of arguments or a mapping of keyword "
            f"arguments, got {type(inputs).__name__}{names} ({type(error).__name__}: {error})",
            remedy=remedy,
        ) from error


def call_on_batch(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Any] | None, where: str) -> Any:
    """Return the user's loss on a batch, or without one the model's output."""
    return loss(model, batch) if loss else call_model(model, batch, where, "or pass loss(model, batch)")


def loss_of(output: Any) -> Any:
    """Return the loss in a model's output, None if it has none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def forget_compiled() -> None:
    """Drop earlier results of ``torch.compile`` in this process, which ignore hooks registered since."""
    # dynamo does not check if a module got its first hook (torch 2.13, skip_nnmodule_hook_guards)
    if "torch._dynamo" in sys.modules:  # without it nothing was compiled, and importing it takes a second
        torch.compiler.reset()


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module, training or evaluation, at the end."""
    # Module by module, because users may keep some in eval mode (frozen BatchNorm), which train() would change.
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore the values of each buffer at the end."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def cache_configs(*models: nn.Module) -> list[Any]:
    """Return each configuration in these models that has a switch for the key-value cache, once."""
    modules = (module for model in models for module in model.modules())
    # Parts have their own configurations (the text model of a vision-language model).
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if isinstance(getattr(config, "use_cache", None), bool)]


@contextmanager
def without_cache(configs: Iterable[Any]) -> Iterator[None]:
    """Switch off the key-value cache, and restore the configurations at the end.

    A loss needs no cache, which takes memory. With a cache transformers (5.23) ignores where documents of a packed
    batch begin, so that tokens attend across documents.
    """
    switched = [config for config in configs if config.use_cache]
    for config in switched:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched:
            config.use_cache = True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode without a key-value cache, and restore all at the end."""
    with modes_restored(model), without_cache(cache_configs(model)):
        model.eval()
        yield


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode without gradients and key-value cache, and restore it at the end."""
    with evaluating(model), torch.no_grad():
        yield


class ExampleCalls:
    """The arguments of the outermost calls that use the wanted weights, in the user's first micro-batch.

    A model that its trainer calls as a whole gives one call. A LightningModule whose ``training_step`` calls its parts
    gives one per part. Connections between the parts are then unknown, and so are not pruned.
    """

    def __init__(self, model: nn.Module, modules: set[nn.Module]) -> None:
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._open: list[tuple[nn.Module, Any, bool]] = []  # with its own forward, and True if that is called
        self._has_expired = False
        self._handles: list[Any] = []
        # Under torch.compile hooks stay outside the graph, which cannot record calls.
        enter, leave = (RunHook(torch.compiler.disable(hook)) for hook in (self._enter, self._leave))  # type: ignore[no-untyped-call]
        # On every module that contains a wanted one, because users may call a part of the model directly.
        for module in model.modules():
            if not modules.isdisjoint(module.modules()):
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                # always_call: a forward that raised an error must restore the stack.
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._drop_redirected()
        # Only the outermost and only in training, because it repeats nested calls.
        if not any(is_own for _, _, is_own in self._open) and module.training and torch.is_grad_enabled():
            if self._has_expired:
                self.calls, self._has_expired = [], False
            if all(called is not module for called, _, _ in self.calls):
                self.calls.append((module, args, kwargs))
        self._open.append((module, module.__dict__.get("forward"), True))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._drop_redirected()
        if self._open and self._open[-1][0] is module:
            self._open.pop()

    def _drop_redirected(self) -> None:
        """Forget a call whose arguments were for another method."""
        # Under DDP, Lightning and Fabric replace `forward` by a function that calls a method: its calls are outermost.
        for index, (module, forward, is_own) in enumerate(self._open):
            if is_own and module.__dict__.get("forward") is not forward:
                self._open[index] = (module, forward, False)
                self.calls = [call for call in self.calls if call[0] is not module]

    def replay(self) -> list[Any]:
        """Call the same modules with the same arguments again, and return their outputs."""
        return [module(*args, **kwargs) for module, args, kwargs in self.calls]

    def expire(self) -> None:
        """Mark the end of the step: the next micro-batch replaces these calls."""
        self._has_expired = True

    def close(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._handles)


Solve = Callable[[str, nn.Module, Tensor], None]
"""Called with (name, layer, ``X Xᵀ`` of its inputs). Changes the layer."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def has_rows(module: nn.Module) -> bool:
    """Return True if a layer multiplies vectors along the last axis of its input by its weight."""
    return isinstance(module, nn.Linear) or is_transformers_conv1d(module)


def solve_in_order(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    run: Callable[[Any], Any],
    batches: Sequence[Any],
    solve: Solve,
    where: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Call `solve` for every layer with its inputs, in evaluation mode and without gradients.

    If a ``ModuleList`` holds blocks that form a chain, layers of a block receive the outputs of the earlier, already
    changed blocks. Hidden states are kept on the CPU, and only one block's Hessians are in memory at a
    time. Layers outside the blocks come last, in one more pass. In other models all layers see the inputs of the
    unchanged model, and all Hessians are in memory at once and solved in the order of `layers`.
    """
    blocks = _blocks(model, layers)
    calls: list[list[_Call]] = []
    with evaluated(model):
        for done, batch in enumerate(batches, 1):
            if blocks:
                recorded = _record(blocks, lambda batch=batch: run(batch))  # type: ignore[misc]
                if recorded is None:
                    blocks = []
                else:
                    calls.append(recorded)
            if progress is not None:
                progress(done, len(batches))
        left = dict(layers)
        for number, block in enumerate(blocks):
            inside = {id(module) for module in block.modules()}
            own = {name: left.pop(name) for name, layer in layers.items() if id(layer) in inside and name in left}
            with _hessians(own) as found:
                for each in calls:
                    _again(block, each[number])
            _solve(own, found, solve, where)
            for each in calls if number + 1 < len(blocks) else ():
                each[number + 1] = _with_hidden(each[number + 1], _hidden(_again(block, each[number])).cpu())
                each[number] = ((), {})
        if left:
            with _hessians(left) as found:
                for batch in batches:
                    run(batch)
            _solve(left, found, solve, where)


def _blocks(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the list of modules of one class that holds most of the layers; empty if none holds several."""
    wanted, best, most = {id(layer) for layer in layers.values()}, list[nn.Module](), 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            held = sum(id(part) in wanted for part in module.modules())
            if held > most:
                best, most = list(module), held
    return best


def _record(blocks: list[nn.Module], run: Callable[[], Any]) -> list[_Call] | None:
    """Return the arguments of each block, on the CPU; None if the blocks are no chain."""
    calls: list[_Call] = []
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    last: list[Any] = [None]
    chained = [True]

    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):  # once, even if blocks share it; kept alive so that ids stay unique
            return kept.setdefault(id(value), (value, value.detach().to("cpu", copy=True)))[1]
        return None if hasattr(value, "get_seq_length") else value  # a cache: empty here, filled again elsewhere

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = len(calls)
        hidden: Any = args[0] if args else next(iter(kwargs.values()), None)
        right = number < len(blocks) and block is blocks[number] and isinstance(hidden, Tensor)
        chained[0] = chained[0] and right and (number == 0 or hidden is last[0])
        if not chained[0]:
            return
        first = hidden.detach().to("cpu", copy=True) if number == 0 else None
        rest: _Call = (args[1:], kwargs) if args else ((), dict(list(kwargs.items())[1:]))
        moved = tree_map(on_cpu, rest)
        calls.append(((first, *moved[0]), moved[1]) if args else ((), {next(iter(kwargs)): first, **moved[1]}))

    def leave(block: nn.Module, args: Any, output: Any) -> None:
        last[0] = _hidden(output)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        run()
    finally:
        remove_hooks(handles)
    return calls if chained[0] and len(calls) == len(blocks) else None


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _with_hidden(call: _Call, hidden: Tensor) -> _Call:
    args, kwargs = call
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): hidden})


def _again(block: nn.Module, call: _Call) -> Any:
    """Call a block with copies of the stored arguments, which it may change, on its device."""
    device = next(block.parameters()).device
    args, kwargs = tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, call)
    return block(*args, **kwargs)


@contextlib.contextmanager
def _hessians(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Sum ``X Xᵀ`` of each layer's inputs over positions and examples, in float32 (float64 for float64)."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            rows = x.detach().reshape(-1, x.shape[-1])
            rows = rows if rows.dtype == torch.float64 else rows.float()
            if len(rows):
                gram = rows.t() @ rows
                found[name] = found[name].add_(gram) if name in found else gram

        return see

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield found
    finally:
        remove_hooks(handles)


def _solve(layers: Mapping[str, nn.Module], found: dict[str, Tensor], solve: Solve, where: str) -> None:
    for name, layer in layers.items():
        if name not in found:
            rule, remedy = f"calibration must reach {name}, got no input", "skip it, or use other batches"
        elif not bool(torch.isfinite(found[name].diagonal()).all()):
            rule, remedy = f"inputs of {name} must be finite, got NaN or infinity", "check the batches"
        else:
            solve(name, layer, found.pop(name))
            continue
        raise TrainingError(where, rule, remedy)
