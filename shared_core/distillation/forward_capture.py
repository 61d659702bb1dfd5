"""Record one forward of the student for distillation: its inputs and the positions that count."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.distillation.outputs import EMBEDDINGS, holds
from shared_core.distillation.unlabeled import IGNORED, rows_that_count
from shared_core.errors import ConfigError, TrainingError

# With labels the teacher would compute an unneeded loss, or reject arguments that trainers add.
FOR_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Cached per module (weak keys): each micro-batch needs it, and walking a model is slow.
_INSIDE: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Cached per function with weak keys, so deleting a model also deletes its entry.
_NAMES: weakref.WeakKeyDictionary[Callable[..., Any], tuple[list[str], set[str] | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Forward:
    """One forward of the student."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    earlier: tuple[Forward, ...] = ()
    """For embeddings: the other forwards of the same loss, one per compared text."""


class ForwardHook:
    """Forward hook that records the latest training forward. Register it inside a `RunHook`."""

    def __init__(self) -> None:
        self.active = False
        self.latest: Forward | None = None
        self.missed = ""
        """Why the latest forwards were not recorded, if some ran but none was a training forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record a training forward."""
        if not self.active:
            return
        if not trains(module):
            self.missed = "in eval mode" if torch.is_grad_enabled() else "without gradients"
        else:
            earlier: tuple[Forward, ...] = ()
            # A contrastive loss runs the encoder once per text column, so later forwards keep the earlier ones.
            if self.latest is not None and isinstance(output, Mapping) and holds(output, EMBEDDINGS):
                # A flat list, so each forward is kept once.
                earlier = (*self.latest.earlier, replace(self.latest, earlier=()))
            self.latest = Forward(args, kwargs, output, earlier)

    def take(self) -> Forward | None:
        """Return the latest forward and forget it."""
        latest, self.latest, self.missed = self.latest, None, ""
        return latest


def unseen(missed: str) -> TrainingError:
    """Return the error for a loss without a student forward before it; for `missed` see `ForwardHook`."""
    remedy = (
        'set distill.student to the name of the submodule that computes the logits, such as "net", and call the '
        "module, not its forward method"
    )
    if missed == "without gradients":
        remedy = (
            "use a loss that keeps the graph of its forward. Cached losses of sentence-transformers "
            "(CachedMultipleNegativesRankingLoss, CachedGISTEmbedLoss) do not: use their versions without a cache"
        )
    elif missed:
        remedy = "call student.train() before its training forward"
    seen = f"ran {missed} only" if missed else "was not seen"
    return TrainingError(
        "distill",
        f"the student's forward must run before the loss, in train mode and with gradients, but it {seen}",
        remedy,
    )


def lacks_forward(module: nn.Module) -> bool:
    """Return True if a module's class inherits a forward that only raises, as a LightningModule's does."""
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return owner is nn.Module or owner.__name__ == "LightningModule"


def trains(module: nn.Module) -> bool:
    """Return True if this is a training forward and not one that activation checkpointing repeats in backward."""
    # Forwards that checkpointing repeats run inside a backward (a graph task is active) and must not be kept twice.
    repeated = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    return module.training and torch.is_grad_enabled() and not repeated


def named_inputs(student: nn.Module, forward: Forward) -> dict[str, Any]:
    """Return inputs by name: keywords, positional arguments by the signature's names, and keys of a dict batch."""
    try:
        # Not `bind_partial`, which is slow and not needed: forward has already accepted these arguments.
        named = {**dict(zip(_names_of(student)[0], forward.args, strict=False)), **forward.kwargs}
    except (TypeError, ValueError):
        named = dict(forward.kwargs)
    for value in forward.args:
        if isinstance(value, Mapping):
            named = {**value, **named}
    return named


def ask_teacher(teacher: nn.Module, student: nn.Module, forward: Forward) -> Any:
    """Return the output of a teacher in eval mode for the student's inputs, without labels and gradients.

    The student's ``use_cache`` is not passed on. To change the teacher's own default, use
    `shared_core.modules.calls.without_cache`.
    """
    like = first_parameter(teacher, floating=True)
    names = _names_of(student)[0]
    args = tuple(
        # Labels become None so that later positional arguments keep their position.
        None if name in FOR_THE_LOSS else _on(_as_given(_without_labels(value), forward), like)
        for name, value in zip([*names, *[""] * len(forward.args)], forward.args, strict=False)
    )
    accepted = keywords_of(teacher)
    kwargs = {
        name: _on(value, like)
        for name, value in forward.kwargs.items()
        if name not in FOR_THE_LOSS and (accepted is None or name in accepted)
    }
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    # Encoder-decoder students build decoder inputs from labels, which the teacher does not get. So build them here.
    shift = _decoder_inputs_of(student)
    named = named_inputs(student, forward) if shift else {}
    given = any(named.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    if shift and not given and isinstance(named.get("labels"), Tensor):
        kwargs["decoder_input_ids"] = _on(shift(named["labels"]), like)
    try:
        with torch.no_grad():
            return teacher(*args, **kwargs)
    except TypeError as error:
        _check_fit(teacher, args, kwargs, error)
        raise
    except IndexError as error:
        raise TrainingError(
            "distill",
            f"teacher must have an embedding for every token in the student's inputs, got {type(teacher).__name__}: "
            f"{error}",
            "use a teacher with the student's tokenizer and as many tokens (resize_token_embeddings)",
        ) from error


def _decoder_inputs_of(student: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the function with which an encoder-decoder model builds decoder inputs from labels (Transformers)."""
    inside = models_inside(student)
    student = inside[0] if len(inside) == 1 else student
    shift: Callable[[Tensor], Tensor] | None = getattr(student, "prepare_decoder_input_ids_from_labels", None)
    model: Any = getattr(student, "get_base_model", lambda: student)()  # under PEFT's wrapper
    config: Any = getattr(model, "config", None)
    generates = type(model).__name__.endswith(("ForConditionalGeneration", "ToText"))  # else labels are not tokens
    if shift is not None or not generates or not getattr(config, "is_encoder_decoder", False):
        return shift
    for kind in type(model).__mro__:  # Whisper, M2M100, Blenderbot: a function in the class's module
        beside = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
        if beside is not None:
            return lambda labels: beside(labels, config.pad_token_id, config.decoder_start_token_id)
    return getattr(model, "_shift_right", None)


def _check_fit(teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> None:
    """Raise `TrainingError` if a teacher failed because its forward does not take these inputs."""
    try:
        inspect.signature(teacher.forward).bind(*args, **kwargs)
    except TypeError as misfit:
        given = f"{len(args)} by position" + "".join(f", {name}" for name in kwargs)
        raise TrainingError(
            "distill",
            f"teacher must have a forward that takes the student's inputs ({given}), got {type(teacher).__name__}: "
            f"{misfit}",
            "wrap it in a module whose forward accepts them",
        ) from error


def first_parameter(module: nn.Module, *, floating: bool = False) -> Tensor | None:
    """Return the first of ``module.parameters()``, or the first floating point one."""
    # Called in every micro-batch, and torch's own generators take ten times as long to start.
    for parameter in module._parameters.values():
        if parameter is not None and (not floating or parameter.is_floating_point()):
            return parameter
    for child in module._modules.values():
        if child is not None and (found := first_parameter(child, floating=floating)) is not None:
            return found
    return None


def is_causal(student: nn.Module) -> bool:
    """Return True if a model's class says that position i predicts token i + 1 (Transformers' naming)."""
    inside = models_inside(student) or [student]
    trained = [model for model in inside if any(parameter.requires_grad for parameter in model.parameters())]
    report = {_says_causal(model): type(model).__name__ for model in trained or inside}
    if len(report) > 1:
        raise ConfigError(
            "distill",
            f"causal must be given for {type(student).__name__}, got none: it holds {report[True]}, a causal language "
            f"model, and {report[False]}, which is not one",
            "set distill.causal, or distill.student to the submodule that computes the logits",
        )
    return True in report


def models_inside(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models in a module with Transformers' class names: itself, or those that it wraps."""
    found = [reference() for reference in _INSIDE.get(module, (lambda: None,))]
    if None in found:  # not cached yet, or its model has been replaced
        found = [*_outermost(module)]
        _INSIDE[module] = [weakref.ref(model) for model in found if model is not None]
    return [model for model in found if model is not None]


def _outermost(module: nn.Module) -> list[nn.Module]:
    names = [kind.__name__ for kind in type(module).__mro__]
    stock = "PreTrainedModel" in names and type(module).__module__.startswith("transformers.")
    if stock or any(name.endswith(_CAUSAL) for name in names):
        return [module]
    return [*dict.fromkeys(model for child in module.children() for model in _outermost(child))]


def _says_causal(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    if any(kind.__name__.endswith(_CAUSAL) for kind in type(model).__mro__):
        return True
    return getattr(config, "is_decoder", False) is True


def labels_are_inputs(labels: Any, inputs: Mapping[str, Any]) -> bool:
    """Return True if each label equals the token at its own position, as only in training a causal language model.

    Example:
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> labels_are_inputs(tokens, {"input_ids": tokens}), labels_are_inputs(tokens + 1, {"input_ids": tokens})
        (True, False)
    """
    tokens = inputs.get("input_ids", next(iter(inputs.values()), None))
    if not (isinstance(labels, Tensor) and isinstance(tokens, Tensor)):
        return False
    if labels.ndim != 2 or labels.shape != tokens.shape or labels.is_floating_point() or tokens.is_floating_point():
        return False
    counted = labels != IGNORED
    named = labels[counted]
    return bool(named.numel() and (named != named[0]).any()) and torch.equal(named, tokens.to(labels.device)[counted])


def counted_positions(
    logits: Tensor, labels: Any, attention_mask: Any, *, causal: bool, unlabeled: Tensor | None = None
) -> Tensor | None:
    """Return a bool mask of the logits' rows that count, None if all do.

    A position counts if its label is not -100. In a causal LM the logits at i predict label i + 1, so the last position
    never counts. In unlabeled examples, and without labels, all positions except padding (by the attention mask)
    count. With one label per example all examples count: a label of -100 means unlabeled.
    """
    shape = tuple(logits.shape[:-1])
    is_tensor = isinstance(labels, Tensor)
    if labels is not None and (not is_tensor or labels.is_floating_point() or tuple(labels.shape) != shape):
        got = f"{labels.dtype} {tuple(labels.shape)}" if is_tensor else type(labels).__name__
        way_out = "logits of pixels, boxes or CTC sequences have no such labels and cannot be distilled"
        if is_tensor and labels.is_floating_point():
            way_out = "use divergence logit_mse for regression, bernoulli_kl for multi-label targets"
        raise ConfigError(
            "distill",
            f"labels must be class indices of shape {shape}, one per row of the logits {tuple(logits.shape)}, "
            f"got {got}",
            way_out,
        )
    counts = rows_that_count(shape, labels, attention_mask, causal=causal, unlabeled=unlabeled)
    return None if counts is None else counts.to(logits.device)


def _names_of(module: nn.Module) -> tuple[list[str], set[str] | None]:
    """Return the names of forward's positional arguments, and of all arguments (None: it accepts any)."""
    # Cached by function, as inspecting takes longer than small layers and a wrapper may replace forward.
    forward = module.forward
    # A bound method would not do as a key: it is a new object at each access.
    function = getattr(forward, "__func__", forward)
    if (known := _NAMES.get(function)) is None:
        parameters = inspect.signature(forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        known = _NAMES[function] = positional, None if takes_any else {parameter.name for parameter in parameters}
    return known


def keywords_of(module: nn.Module) -> set[str] | None:
    """Return the keywords that forward accepts, None if it accepts any."""
    return _names_of(module)[1]


def _without_labels(value: Any) -> Any:
    if isinstance(value, Mapping) and any(name in value for name in FOR_THE_LOSS):
        return {name: item for name, item in value.items() if name not in FOR_THE_LOSS}
    return value


def _as_given(value: Any, forward: Forward) -> Any:
    """Return the batch without outputs that the student wrote into it (sentence-transformers)."""
    # The teacher would treat these outputs, which require gradients, as inputs.
    if not isinstance(value, dict) or not any(value is given for given in forward.args if given is forward.output):
        return value
    return {name: item for name, item in value.items() if not (isinstance(item, Tensor) and item.requires_grad)}


def _on(value: Any, like: Tensor | None) -> Any:
    """Return tensors on the teacher's device, floating point ones in its dtype."""
    if like is not None and isinstance(value, Tensor):
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    if like is not None and type(value) is dict:
        return {name: _on(item, like) for name, item in value.items()}
    return value
