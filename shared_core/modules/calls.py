"""A model run on example inputs, whatever way it takes them, in eval mode and without a key-value cache.

The calls of one micro-batch, kept so that what depends on what can be traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shared_core.errors import ConfigError, EffError


def call(model: nn.Module, example_inputs: Any) -> Any:
    """Return what the model makes of a tensor, a tuple of arguments or a mapping of keyword arguments.

    A function without arguments is called instead: it may call the model's parts one by one.
    """
    if callable(example_inputs):
        return example_inputs()
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    return model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)


def call_model(
    model: nn.Module, inputs: Any, where: str = "model: inputs", remedy: str = "give them without labels"
) -> Any:
    """Return the model's output, as `call` does.

    Example:
        >>> call_model(nn.Identity(), (torch.ones(1),))
        tensor([1.])
    """
    with naming(inputs, where, remedy):
        return call(model, inputs)


@contextmanager
def naming(inputs: Any, where: str, remedy: str) -> Iterator[None]:
    """Surround the call of a user's model with inputs, so that its errors name these."""
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
    """Return what the user's loss makes of a batch, or the model itself."""
    return loss(model, batch) if loss else call_model(model, batch, where, "or pass loss(model, batch)")


def forget_compiled() -> None:
    """Drop what ``torch.compile`` made earlier in this process: it runs without hooks that were registered since."""
    # dynamo does not look whether a module without hooks has got one (torch 2.13, skip_nnmodule_hook_guards)
    if "torch._dynamo" in sys.modules:  # without it nothing was compiled, and to import it takes a second
        torch.compiler.reset()


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Give each module afterwards the mode that it has now, training or evaluation."""
    # Modules one by one: a user may have left some in eval mode (frozen BatchNorm), and train() would wake these.
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Give each buffer afterwards the values that it has now."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def cache_configs(*models: nn.Module) -> list[Any]:
    """Return the configurations in these models that have a switch for the key-value cache, once each."""
    modules = (module for model in models for module in model.modules())
    # Parts have configurations of their own (the text model of a vision-language model).
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if isinstance(getattr(config, "use_cache", None), bool)]


@contextmanager
def without_cache(configs: Iterable[Any]) -> Iterator[None]:
    """Switch off the key-value cache; afterwards each configuration has its own value again.

    No loss needs keys and values, and they take memory. transformers (5.23) ignores where documents of a packed batch
    begin as soon as there is a cache, so that tokens attend across documents.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(use_cache=True)
        >>> with without_cache([config]):
        ...     inside = config.use_cache
        >>> inside, config.use_cache
        (False, True)
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
    """Put every module into evaluation mode, without a key-value cache; afterwards each is as it was."""
    with modes_restored(model), without_cache(cache_configs(model)):
        model.eval()
        yield


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients or a key-value cache, and back afterwards."""
    with evaluating(model), torch.no_grad():
        yield


class ExampleCalls:
    """The arguments of the outermost calls that reach every weight within reach, in the user's own first micro-batch.

    A model that its trainer calls whole gives one call. A LightningModule whose ``training_step`` calls its parts gives
    one a part; what connects the parts is then not seen, and so is not pruned.
    """

    def __init__(self, model: nn.Module, modules: set[nn.Module]) -> None:
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._open: list[tuple[nn.Module, Any, bool]] = []  # with its own forward, and whether that is called
        self._has_expired = False
        self._handles: list[Any] = []
        # Under torch.compile they stay outside of the graph, which cannot note such things.
        enter, leave = (torch.compiler.disable(hook) for hook in (self._enter, self._leave))  # type: ignore[no-untyped-call]
        # A hook on every module that has one of the wanted inside: the outermost that is called is found while
        # running, since a user may call a part of the model directly.
        for module in model.modules():
            if not modules.isdisjoint(module.modules()):
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                # always_call: a forward that raised must leave the stack as it was.
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._drop_redirected()
        # Only the outermost, only in training: nested calls are repeated by it.
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
        # Under DDP, Lightning and Fabric put a function in place of `forward` that restores it and then calls the
        # method, such as `training_step`: what that calls is outermost.
        for index, (module, forward, is_own) in enumerate(self._open):
            if is_own and module.__dict__.get("forward") is not forward:
                self._open[index] = (module, forward, False)
                self.calls = [call for call in self.calls if call[0] is not module]

    def replay(self) -> list[Any]:
        """Call the same modules with the same arguments again, and return their outputs."""
        return [module(*args, **kwargs) for module, args, kwargs in self.calls]

    def expire(self) -> None:
        """The step is over: the next micro-batch takes the place of these calls."""
        self._has_expired = True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
