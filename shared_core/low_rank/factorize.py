"""Factorize a trained model in one go, by its weights alone or with a few batches, and load saved factors."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats import load_checkpoint
from shared_core.checkpoint_formats.plain import check_values, unlike
from shared_core.distributed.collectives import world_size
from shared_core.distributed.sharded_tensors import whole
from shared_core.engine.checks import coverage
from shared_core.engine.plan import Touched
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.low_rank.config import LowRankConfig, read_report
from shared_core.low_rank.layers import (
    CHANNEL,
    LINEAR,
    SPATIAL,
    InputStatistics,
    LowRankLayer,
    as_matrix,
    factorized,
    is_transposed,
    put_in_,
    relative_error,
    schemes,
)
from shared_core.low_rank.rank_selection import Candidate, candidates, choose_ranks, measure_worth, select
from shared_core.modules.calls import call_on_batch, evaluated, loss_of, remove_hooks
from shared_core.modules.like_stock import taking_look_alikes
from shared_core.modules.matching import check_model, replaced
from shared_core.modules.own_forward import fast_paths_off

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class LowRankReport:
    """The result of `factorize`.

    Args:
        layers: One entry per factorized layer: name, scheme, rank, full_rank, parameters before and after, the share of
            energy kept, the relative error of its weight and, with calibration, of its output.
        left_out: Every other layer within reach → why it is left unchanged.
        parameters: Of the whole model, before and after.
        decomposition: What the truncation preserves best.
        batches: Number of calibration batches.
        seconds: Time taken.
        coverage: How much of the model is within reach (`shared_core.engine.checks.coverage.Reach`).
    """

    layers: list[dict[str, Any]]
    left_out: dict[str, str]
    parameters: tuple[int, int]
    decomposition: str
    batches: int
    seconds: float
    coverage: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        before, after = self.parameters
        return asdict(self) | {"parameters": {"before": before, "after": after}}


@taking_look_alikes
def factorize(
    model: nn.Module,
    config: LowRankConfig | Mapping[str, Any],
    batches: Iterable[Any] | None = None,
    *,
    loss: Loss | None = None,
    allow_partial: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LowRankReport:
    r"""Replace layers of a model by products of two smaller ones in place, and return a report.

    ``W ≈ B A`` with ``B`` (m, r) and ``A`` (r, n), where ``r (m + n) < m n``. All decompositions and inputs come from
    the original model. Names of other parameters, modes, dtypes and devices stay. Make optimizers afterwards.

    Args:
        model: Its linear layers, transformers' Conv1D and `nn.Conv2d` are replaced in place.
        config: A `LowRankConfig`, or options as in a recipe's ``low_rank`` section. ``merge`` is not allowed.
        batches: For ``scaled``, ``whitened`` and ``sensitivity``. The first ``calibration_batches`` are used. Each is a
            tensor, a tuple of arguments, a mapping of keyword arguments, or what `loss` takes.
        loss: ``loss(model, batch)`` returns the loss of a batch. By default the output's ``loss``.
        allow_partial: Accept less than half of the weights that multiply activations within reach.
        progress: Called with (done, total) while batches run or sensitivity is measured.

    Raises:
        ConfigError: If an option is invalid, or batches are missing.
        MatchError: If there is nothing to factorize, or too little (see `allow_partial`).
        CompatibilityError: If the model is already factorized or sharded, or batches are spread over processes.
        TrainingError: If a weight or an input is not finite, or a layer received no input.

    Source: Eckart and Young, 1936; Wang et al., 2024 (SVD-LLM), arXiv:2403.07378; of convolutions Zhang et al., 2015,
        arXiv:1505.06798 (channel), Jaderberg et al., 2014, arXiv:1405.3866 (spatial).

    Example:
        >>> net = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> report = factorize(net, {"rank": 8})
        >>> report.parameters, net[0].rank, report.left_out
        ((7114, 2026), 8, {})
    """
    started = time.perf_counter()
    check_model(model, "low_rank")
    config = config if isinstance(config, LowRankConfig) else LowRankConfig.from_dict(config)
    model = getattr(model, "_orig_mod", model)  # unwrap a compiled model
    if config.merge:
        raise ConfigError("low_rank", "merge must be left out here, got true", "call shared_core.low_rank.merge(model)")
    if factorized(model):
        raise CompatibilityError("low_rank", "the model is already factorized", "merge it first")
    data = _checked(config, batches)
    before = sum(parameter.numel() for parameter in model.parameters())
    layers, left_out = select(model, config)
    moments = _moments(model, config, layers, data, loss, progress) if config.needs_batches else {}
    plan, kept_out = plan_ranks(config, layers, moments, lambda: _mean_loss(model, data, loss), progress)
    left = left_out | kept_out
    sizes = {name: candidate.numel for name, (candidate, _) in plan.items()}
    reached = coverage.after_training(
        coverage.count(model), Touched(sizes, left, "factorized layers"), config, model, where="low_rank",
        allow_partial=allow_partial,
    )  # fmt: skip
    entries = apply(model, plan, moments)
    for layer in entries:
        model.get_submodule(layer["name"]).release()  # type: ignore[operator]
    fast_paths_off(model, (LowRankLayer,))
    after = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.perf_counter() - started
    return LowRankReport(entries, left, (before, after), config.decomposition, len(data), seconds, reached.to_dict())


Plan = Mapping[str, tuple[Candidate, int]]


def plan_ranks(
    config: LowRankConfig,
    layers: Mapping[str, Any],
    moments: Mapping[tuple[str, str], Tensor],
    loss: Callable[[], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Plan, dict[str, str]]:
    """Return each layer's decomposition and rank, and why others are left unchanged."""
    rule = config.rule
    if rule.kind == "report":
        structure = read_report(rule.value)
        unfit = [
            name for name, entry in structure.items()
            if name not in layers or entry["scheme"] not in schemes(layers[name])
        ]  # fmt: skip
        if unfit:
            got = {name: structure[name]["scheme"] for name in unfit[:5]}
            wrong = f"report {rule.value} must name layers that can be factorized here with its scheme, got {got}"
            remedy = "use the model that it was written for, and the same include, skip and min_size"
            raise ConfigError("low_rank", wrong, remedy)
        plan = {}
        for name, entry in structure.items():
            scheme = LowRankConfig(rank=1, conv="auto" if entry["scheme"] == "linear" else entry["scheme"])
            each = candidates({name: layers[name]}, scheme, moments)[name]
            plan[name] = (each, min(entry["rank"], each.full))
        return plan, {name: "the report does not factorize it" for name in layers if name not in structure}
    found = candidates(layers, config, moments)
    worth = measure_worth(found, loss, config.multiple_of, progress) if rule.kind == "sensitivity" and loss else None
    ranks, left_out = choose_ranks(found, config, worth)
    return {name: (found[name], rank) for name, rank in ranks.items()}, left_out


def apply(model: nn.Module, plan: Plan, moments: Mapping[tuple[str, str], Tensor]) -> list[dict[str, Any]]:
    """Put the factorized layers into a model, and return an entry for each."""
    new = put_in_(model, {name: {"rank": rank, "scheme": each.scheme} for name, (each, rank) in plan.items()})
    lines = []
    for name, (each, rank) in plan.items():
        layer, moment = new[name], moments.get((name, each.scheme))
        layer.set_factors_(*each.spectrum.factors(rank))
        lines.append({
            "name": name, "scheme": each.scheme, "rank": rank, "full_rank": each.full,
            "parameters_before": each.numel, "parameters_after": rank * each.side,
            "energy": round(float(each.spectrum.energy()[rank - 1]), 6), **errors(layer, moment),
        })  # fmt: skip
    return lines


def errors(layer: LowRankLayer, moment: Tensor | None) -> dict[str, float]:
    """Return the relative error of the weight and, with a moment, of the output."""
    factors = (whole(getattr(layer, part).weight) for part in ("first", "second"))
    pair = (layer.dense.weight, layer.weight_of(*factors))
    weight, merged = (as_matrix(value.detach().double(), layer.scheme, layer.transposed) for value in pair)
    error = {"weight_error": relative_error(weight, merged)}
    return error if moment is None else error | {"output_error": relative_error(weight, merged, moment)}


def _checked(config: LowRankConfig, batches: Iterable[Any] | None) -> list[Any]:
    kind = config.rule.kind
    needs = kind if kind == "sensitivity" else config.decomposition if config.needs_batches else ""
    if not needs:
        return []
    if world_size() > 1:
        rule = f"calibration must run in one process, got {world_size()}"
        raise CompatibilityError("low_rank", rule, "factorize before starting several processes")
    if not (data := list(itertools.islice(() if batches is None else batches, config.calibration_batches))):
        raise ConfigError("low_rank", f"batches must be given with {needs}, got none", "pass some")
    return data


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    # A graph compiled before the hooks existed would run without them.
    with evaluated(model), torch.compiler.set_stance("force_eager"):
        yield


def _moments(
    model: nn.Module, config: LowRankConfig, layers: Mapping[str, Any], data: list[Any], loss: Loss | None,
    progress: Callable[[int, int], None] | None,
) -> dict[tuple[str, str], Tensor]:  # fmt: skip
    moments = InputStatistics(
        {name: (layer, schemes(layer)) for name, layer in layers.items()}, diagonal=config.decomposition == "scaled"
    )
    handles = moments.hooks()
    try:
        with _evaluated(model):
            for done, batch in enumerate(data, 1):
                call_on_batch(model, batch, loss, "low_rank: batches")
                if progress:
                    progress(done, len(data))
    finally:
        remove_hooks(handles)
    return moments.read()


def _mean_loss(model: nn.Module, data: list[Any], loss: Loss | None) -> float:
    with _evaluated(model):
        found = [call_on_batch(model, batch, loss, "low_rank: batches") for batch in data]
    if loss is None:
        found = [*map(loss_of, found)]
    if any(not isinstance(each, Tensor | float) or (isinstance(each, Tensor) and each.numel() != 1) for each in found):
        remedy = "pass loss(model, batch), or use batches with labels and a model whose output has a loss"
        raise ConfigError("low_rank", "loss must be a number for sensitivity", remedy)
    return sum(float(each) for each in found) / len(found)


_FIRST, _SECOND = ".first.weight", ".second.weight"
WEIGHTS_FILE = "low_rank.safetensors"
"""A name that `from_pretrained` ignores: it would load the rest, and initialize the factorized layers randomly."""
_OURS, _PLAIN = "low_rank*.safetensors", "model*.safetensors"


@taking_look_alikes
def load(model: nn.Module, weights: Path | str | Mapping[str, Tensor]) -> nn.Module:
    """Factorize a model like saved weights, load them, and return the model.

    Ranks and schemes come from the names and shapes of the weights, so every file works: a trainer's checkpoint or
    final model, the output of `eff low-rank`, or a state dict.

    Args:
        model: The user's model before it was factorized, trained or not, changed in place. For transformers
            ``AutoModel….from_config(AutoConfig.from_pretrained(folder))``.
        weights: A folder with ``.safetensors``, such a file, a Lightning ``.ckpt``, or a state dict.

    Raises:
        CheckpointError: If the weights cannot be read, or belong to another model.

    Example:
        >>> import torch
        >>> from shared_core.low_rank import LowRankConfig, factorize
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        >>> _ = factorize(net, LowRankConfig(rank=8))
        >>> fresh = load(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), net.state_dict())
        >>> torch.equal(fresh(torch.ones(1, 64)), net(torch.ones(1, 64)))
        True
    """
    state = dict(weights) if isinstance(weights, Mapping) else _own_names(model, _read(Path(weights)))
    structure = read_structure(model, state)
    layers = put_in_(model, structure)
    try:
        _check(model, state)
    except CheckpointError:
        for layer in layers.values():
            replaced(model, {layer: layer.dense})
        raise
    for layer in layers.values():
        layer.release()
    fast_paths_off(model, (LowRankLayer,))
    model.load_state_dict(state, strict=False)
    return model


def _check(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    missing, others = unlike(model, state)
    if missing or others:
        got = f"missing {missing[:3]} and others {others[:3]}"
        rule = f"weights must be those of a factorized {type(model).__name__}, got {got}"
        raise CheckpointError("low_rank", rule, "build the model as it was before it was factorized")
    check_values(model, state, "low_rank")


def read_structure(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return rank and scheme of the layers that the weights hold as two factors, by name."""
    modules: dict[str, Any] = dict(model.named_modules())
    structure = {}
    for key, first in state.items():
        name = key.removesuffix(_FIRST)
        second = state.get(name + _SECOND)
        if name == key or second is None:
            continue
        layer = modules.get(name)
        if not (isinstance(layer, nn.Linear | nn.Conv2d) or (layer is not None and is_transposed(layer))):
            continue  # a user's own module with the same part names
        scheme = LINEAR
        if isinstance(layer, nn.Conv2d):
            scheme = CHANNEL if second.shape[2:].numel() == 1 and first.shape[2:] == layer.kernel_size else SPATIAL
        structure[name] = {"rank": len(first), "scheme": scheme}
    if not structure:
        rule = f"weights must hold factorized layers of {type(model).__name__}, got none"
        raise CheckpointError("low_rank", rule, "load weights of the whole model without this function")
    return structure


def hide(folder: Path | str) -> None:
    """Rename the weights of a factorized model in a folder, so that `from_pretrained` ignores them."""
    for old in Path(folder).glob(_OURS):
        old.unlink()
    for file in Path(folder).glob(_PLAIN):
        file.replace(file.with_name(file.name.replace("model", "low_rank", 1)))
    (Path(folder) / "model.safetensors.index.json").unlink(missing_ok=True)


def _own_names(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the model's names, if its library saves them under others."""
    from shared_core.front_ends.finding import own_weights

    parts = ("first.weight", "second.weight", "second.bias")
    names = dict.fromkeys(
        [*model.state_dict(), *(f"{name}.{part}" for name, _ in model.named_modules() for part in parts)]
    )
    return own_weights(model, list(names), state)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(path.glob(_OURS)) or sorted(path.glob(_PLAIN)) if path.is_dir() else [path]
    try:
        if path.suffix == ".ckpt":
            return dict(load_checkpoint(path)["state_dict"])
        return {name: tensor for file in files or [path / WEIGHTS_FILE] for name, tensor in load_file(file).items()}
    except Exception as error:  # libraries raise various errors for damaged files
        rule = f"{path} must hold safetensors of a factorized model, got {type(error).__name__}: {error}"
        raise CheckpointError("low_rank", rule) from error
