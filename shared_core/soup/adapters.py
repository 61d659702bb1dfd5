"""Averages of LoRA adapters: of their products BA, not of A and B separately.

Averages have other ranks, and can replace the adapter of a PEFT model in training.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats import ADAPTER, Ingredient, averaged, open_ingredient
from shared_core.checkpoint_formats.adapter import (
    ADAPTER_CONFIG,
    LoraLayer,
    check_adapters,
    lora_layers,
    rank_and_alpha,
    scaling,
)
from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.soup.averaging import Candidate, accumulator_dtype, copy_finite_, mean_with_

RANK_FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
"""The fields of an adapter's config that an average changes."""


class AdapterWeights(dict[str, Tensor]):
    """The state dict of an adapter under PEFT's names, with the matching config."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        """The fields of ``adapter_config.json``, for ``LoraConfig(**config)``."""
        self.errors: dict[str, float] = {}
        r"""For each layer cut to a lower rank, ``|cut - average| / |average|`` of BA in the Frobenius norm."""
        self.error = 0.0
        """The same over all layers together."""


class _Factors(NamedTuple):
    """``scale * b @ a``, as matrices or as the kernels of two convolutions."""

    a: Tensor
    b: Tensor
    scale: float


def average_adapters(
    members: Sequence[tuple[Ingredient, float]], rank: int | None = None, into: AdapterWeights | None = None
) -> AdapterWeights:
    r"""Return the adapter whose ``scale * B A`` is the mean of its members': ``sum(w_i s_i B_i A_i) / sum(w_i)``.

    All A and all B are stacked, so ranks add up. Equal members are stacked once, so that their mean is bit-equal. A
    weight that is the same for all goes into alpha, so that no B is rounded again. Biases and modules that are trained
    whole are averaged as in a model.

    Args:
        members: Adapters with their weights. Dtypes and config come from the first.
        rank: If a layer's rank is larger, cut it to the best approximation of this rank (SVD).
        into: Where to write the result.

    Source: stacking is exact algebra; Eckart & Young, 1936, for the cut.
    """
    first = members[0][0]
    soup = AdapterWeights() if into is None else into
    soup.clear()
    soup.config, soup.errors, soup.error = dict(first.config), {}, 0.0
    # fsum rounds once, so the total does not depend on the order of the members.
    total = math.fsum(weight for _, weight in members)
    layers = lora_layers(first)
    of_layers = {key for layer in layers for key in (layer.a, layer.b, layer.bias)}
    # PEFT saves more than factors (modules_to_save, trained token rows), for which the plain mean is right.
    for key in first.specs:
        if key not in of_layers:
            soup[key] = _mean(key, members, [1.0] * len(members))
    ranks: dict[str, tuple[int, float]] = {}
    lost, whole, changed = 0.0, 0.0, False
    for layer in layers:
        parts = _parts(layer, members)
        # A single distinct pair of factors needs no stacking: equal members, or a soup of one, keep bits and rank.
        factors = parts[0][0] if len(parts) == 1 else _stacked(parts, total)
        if rank is not None:
            # Frobenius norms over layers add up as squares.
            norm = _norm(factors)
            if factors.a.shape[0] > rank:
                factors, cut = _cut(factors, rank, parts[0][0].scale)
                soup.errors[layer.module] = cut / norm if norm else 0.0
                lost += cut**2
            whole += norm**2
        changed = changed or factors is not parts[0][0]
        # Copy: otherwise a soup of equal members would use the ingredient's mapped memory, which close() releases.
        soup[layer.a] = factors.a.to(first.spec(layer.a).dtype, copy=True).contiguous()
        soup[layer.b] = factors.b.to(first.spec(layer.b).dtype, copy=True).contiguous()
        ranks[layer.module] = (factors.a.shape[0], factors.scale)
        if first.has(layer.bias):
            # LoRA computes s(BAx + b), and the saved scale is the soup's, so average s_i b_i.
            shares = [scaling(adapter.config, layer.module) / factors.scale for adapter, _ in members]
            soup[layer.bias] = _mean(layer.bias, members, shares)
    soup.error = math.sqrt(lost / whole) if whole else 0.0
    if changed:
        soup.config.update(_config_of(ranks))
    for adapter, _ in members:
        # Reopened at the next read: memory maps of all members at once would count as host memory.
        adapter.close()
    return soup


def _mean(key: str, members: Sequence[tuple[Ingredient, float]], scales: Sequence[float]) -> Tensor:
    """Return the mean of ``scale * tensor``."""
    first = members[0][0]
    if not averaged(first.spec(key).dtype):
        return first.tensor(key).clone()
    mean: Tensor | None = None
    total = 0.0
    for (adapter, weight), scale in zip(members, scales, strict=True):
        tensor = adapter.tensor(key)
        # Scale after widening: a 16-bit product would be rounded a second time.
        tensor = tensor.to(accumulator_dtype(tensor.dtype)) * scale
        total += weight
        mean = tensor if mean is None else mean_with_(mean, mean, tensor, weight, total)
    return torch.as_tensor(mean).to(first.spec(key).dtype)


def _parts(layer: LoraLayer, members: Sequence[tuple[Ingredient, float]]) -> list[tuple[_Factors, float]]:
    """Return the factors of a layer with their weights, equal ones only once."""
    parts: list[tuple[_Factors, float]] = []
    for adapter, weight in members:
        its = _Factors(adapter.tensor(layer.a), adapter.tensor(layer.b), scaling(adapter.config, layer.module))
        same = next((i for i, (other, _) in enumerate(parts) if _equal(its, other)), None)
        if same is None:
            parts.append((its, weight))
        else:
            parts[same] = (parts[same][0], parts[same][1] + weight)
    return parts


def _equal(one: _Factors, two: _Factors) -> bool:
    return one.scale == two.scale and torch.equal(one.a, two.a) and torch.equal(one.b, two.b)


def _stacked(parts: Sequence[tuple[_Factors, float]], total: float) -> _Factors:
    # sum_i w_i s_i B_i A_i = [w_1 s_1 B_1 | ... | w_n s_n B_n] [A_1; ...; A_n]: exact, and ranks add up. The mean of
    # the A times the mean of the B is a different matrix, with cross terms B_i A_j.
    shares = [weight * factors.scale for factors, weight in parts]
    # The first nonzero share becomes the scale, so that its B keeps its bits and the others hold ratios to it.
    unit = next((share for share in shares if share), 1.0)
    dtype = accumulator_dtype(parts[0][0].b.dtype)
    return _Factors(
        # Ranks lie along dimension 0 of A (rank, in, ...), and along dimension 1 of B (out, rank, ...).
        torch.cat([factors.a.to(accumulator_dtype(factors.a.dtype)) for factors, _ in parts], 0),
        torch.cat([factors.b.to(dtype) * (share / unit) for (factors, _), share in zip(parts, shares, strict=True)], 1),
        unit / total,
    )


def _norm(factors: _Factors) -> float:
    # ‖BA‖² = tr(BᵀB AAᵀ) avoids the product, which is as large as the layer's weight.
    a, b = factors.a.double().flatten(1), factors.b.double().flatten(1)
    return factors.scale * math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))


def _cut(factors: _Factors, rank: int, scale: float) -> tuple[_Factors, float]:
    """Return the nearest product of a lower rank, and its distance, from an SVD of the small core ``R_b R_a^T``."""
    # Convolutions: A is (rank, in, kh, kw), B is (out, rank, 1, 1). Flattened, they multiply as matrices.
    a, b = factors.a.double().flatten(1), factors.b.double().flatten(1)
    # b a = Q_b (R_b R_a^T) Q_a^T with Q_a (in, r) and Q_b (out, r). An SVD of the r by r core gives one of the product
    # (Eckart-Young: its first values give the nearest matrix of that rank), in O((in + out) r^2) operations.
    q_a, r_a = torch.linalg.qr(a.T)
    q_b, r_b = torch.linalg.qr(b)
    u, values, v = torch.linalg.svd(factors.scale * r_b @ r_a.T)
    # Split the values evenly between A and B. Keep the first member's scale, so that a model built for this rank can
    # use the factors as they are.
    scale = scale if scale > 0 else 1.0
    # scale B A must equal u diag(values) v, so each factor gets sqrt(values / scale).
    root = (values[:rank] / scale).sqrt()
    rank = root.numel()
    new_a = (root[:, None] * (v[:rank] @ q_a.T)).reshape(rank, *factors.a.shape[1:])
    # The distance to the nearest matrix of that rank is the norm of the omitted values.
    new_b = (q_b @ u[:, :rank] * root).reshape(-1, rank, *factors.b.shape[2:])
    return _Factors(new_a, new_b, scale), float(values[rank:].norm())


def _config_of(ranks: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return the config fields that give each layer its rank and scale."""
    wanted = {module: (rank, _whole(scale * rank)) for module, (rank, scale) in ranks.items()}
    # The most frequent pair becomes the config's default, and the patterns only name exceptions.
    (usual_rank, usual_alpha), _ = Counter(wanted.values()).most_common(1)[0]
    names = {module: f"^{re.escape(module)}" for module in wanted}  # PEFT matches patterns at the end of a name
    return {
        "r": usual_rank,
        "lora_alpha": usual_alpha,
        "rank_pattern": {names[module]: rank for module, (rank, _) in wanted.items() if rank != usual_rank},
        "alpha_pattern": {names[module]: alpha for module, (_, alpha) in wanted.items() if alpha != usual_alpha},
        # With rsLoRA, PEFT would divide alpha by sqrt(r), but scales here are alpha / r. The fields below request
        # initializations from data or a quantized base (LoftQ, EVA), which must not run again for a loaded soup.
        "use_rslora": False,
        "init_lora_weights": True,
        "loftq_config": {},
        "eva_config": None,
    }


def _whole(number: float) -> float:
    # alpha = scale * rank has rounding errors, but PEFT's configs store an integer.
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


def adapter_of(model: nn.Module) -> PeftAdapter | None:
    """Return the adapter of the PEFT model that this model is or contains, or None."""
    peft = sys.modules.get("peft")  # if PEFT is not imported, there is no such model
    found = [] if peft is None else [
        (name, module) for name, module in model.named_modules() if isinstance(module, peft.PeftModel)
    ]  # fmt: skip
    if not found:
        # lora_A without a PeftModel: layers were injected, and there is no config with scales.
        odd = next((name for name, module in model.named_modules() if hasattr(module, "lora_A")), None)
        if odd is None:
            return None
        rule = f"adapters must belong to a PeftModel, got PEFT's layer {odd!r} in {type(model).__name__}"
        raise CompatibilityError("soup", rule, "create the model with peft.get_peft_model")
    if len(found) > 1:
        rule = f"model must hold one PeftModel, got {', '.join(repr(name) for name, _ in found)}"
        raise CompatibilityError("soup", rule, "average the saved adapters of each model separately with `eff soup`")
    return PeftAdapter(model, *found[0])


class PeftAdapter:
    """Reads and replaces the adapter of a PEFT model, and the other model state that its checkpoints hold."""

    def __init__(self, model: nn.Module, name: str, peft_model: Any) -> None:
        self._model, self._peft = model, peft_model
        self._prefix = f"{name}." if name else ""
        # Lightning's checkpoints hold these too, but PEFT's do not.
        inner = [key for key, _ in peft_model.named_buffers()] if name else []
        self._outer = [
            key
            for key in model.state_dict()
            if not key.startswith(self._prefix) or key.removeprefix(self._prefix) in inner
        ]
        self._name, *others = list(peft_model.peft_config)
        kind = str(getattr(self._config.peft_type, "value", self._config.peft_type))
        if others or kind != "LORA" or self._config.is_prompt_learning:
            got = f"{[self._name, *others]}" if others else f"{kind}, whose weights cannot be averaged"
            rule = f"PEFT model must have one LoRA adapter, got {got}"
            raise CompatibilityError("soup", rule, "delete the other adapters, or leave soup out")
        present = Ingredient("the model's adapter", ADAPTER, None, self.weights, self.fields())
        check_adapters(present, present)

    @property
    def _config(self) -> Any:
        return self._peft.peft_config[self._name]

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``adapter_config.json``."""
        fields = self._config.to_dict()
        # The config stores target_modules as a set, whose order differs between processes. JSON has no sets.
        return {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}

    def weights(
        self, state_dict: Mapping[str, Tensor] | None = None, like: Ingredient | None = None
    ) -> dict[str, Tensor]:
        """Return the adapter under PEFT's names, and the other state of checkpoints."""
        from peft import get_peft_model_state_dict

        whole = self._model.state_dict() if state_dict is None else state_dict
        inner = {key.removeprefix(self._prefix): value for key, value in whole.items() if key.startswith(self._prefix)}
        # By default it may ask the Hub whether the base model's vocabulary has changed.
        found = get_peft_model_state_dict(
            self._peft, state_dict=dict(inner), adapter_name=self._name, save_embedding_layers=False
        )
        more = {} if like is None else {key: inner[key] for key in like.specs if key in inner}
        return {**found, **more, **{key: whole[key] for key in self._outer}}

    def ingredient(self, path: Path, load: Callable[[], Mapping[str, Tensor]]) -> Ingredient:
        """Return the adapter in a checkpoint of this run."""
        folder = path if self._name == "default" else path / self._name
        if (folder / ADAPTER_CONFIG).is_file():
            return open_ingredient(folder)
        return Ingredient(str(path), ADAPTER, path, lambda: self.weights(load()), self.fields())

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load this adapter into the model, with any rank. Parameters with a new shape are replaced."""
        # Set ranks and scales of layers first, because `set_peft_model_state_dict` refuses other shapes.
        from peft import set_peft_model_state_dict

        fields, name = cast(AdapterWeights, weights).config, self._name
        for path, layer in self._peft.named_modules():
            if name in getattr(layer, "lora_alpha", ()):
                module = path.removeprefix("base_model.model.")
                layer.r[name], layer.lora_alpha[name] = rank, _ = rank_and_alpha(fields, module)
                layer.scaling[name] = scaling(fields, module)
                _resize(layer, name, rank)
        for field in RANK_FIELDS:
            setattr(self._config, field, fields.get(field))
        set_peft_model_state_dict(self._peft, {k: v for k, v in weights.items() if k not in self._outer}, name)
        own = self._model.state_dict()
        # In place: the trainer's wrappers still refer to the model's own tensors.
        for key in self._outer:
            own[key].copy_(weights[key])


def _resize(layer: Any, name: str, rank: int) -> None:
    # The dimension of the factor's rank: 0 in A, 1 in B.
    for holder, dimension in (("lora_A", 0), ("lora_B", 1)):
        if name in getattr(layer, holder):
            inner = getattr(layer, holder)[name]
            _set_rank(inner, "weight", inner.weight, dimension, rank)
            kind = "features" if hasattr(inner, "out_features") else "channels"
            setattr(inner, f"{('out', 'in')[dimension]}_{kind}", rank)
        # Adapters of embeddings hold bare parameters in `lora_embedding_A` instead of modules.
        embedding = getattr(layer, holder.replace("_", "_embedding_"), {})
        if name in embedding:
            _set_rank(embedding, name, embedding[name], dimension, rank)


def _set_rank(holder: Any, name: str, old: Tensor, dimension: int, rank: int) -> None:
    shape = (*old.shape[:dimension], rank, *old.shape[dimension + 1 :])
    # A new uninitialized Parameter, which `set_peft_model_state_dict` fills next.
    if shape != tuple(old.shape):
        setattr(holder, name, nn.Parameter(old.new_empty(shape), requires_grad=old.requires_grad))


class AdapterCandidate:
    """Like `averaging.Candidate` for adapters: one state dict holds every average in turn."""

    def __init__(self, rank: int | None, after_average: Callable[[dict[str, Tensor]], None] | None) -> None:
        self._rank, self._after = rank, after_average
        self._members: list[tuple[Ingredient, float]] = []
        self.state_dict = AdapterWeights()

    def write_single(self, ingredient: Ingredient) -> str | None:
        """Write one adapter unchanged. Return the name of a tensor with NaN or infinity, if any."""
        self.state_dict.clear()
        self.state_dict.config, self.state_dict.errors, self.state_dict.error = dict(ingredient.config), {}, 0.0
        for key in (*ingredient.specs, *ingredient.ties):
            self.state_dict[key] = ingredient.tensor(key).clone()
        ingredient.close()
        self._written()
        return next((key for key, value in self.state_dict.items() if not copy_finite_(None, value)), None)

    def begin_mean(self, best: Ingredient, weight: float = 1.0) -> None:
        """Start from the best adapter, which determines the soup's dtypes and config."""
        # No running mean: a product of stacked factors cannot be updated in place.
        self._members = [(best, weight)]

    def write_mean(self) -> None:
        """Write the mean of the members accepted so far. A single member is written unchanged."""
        self._write(self._members)

    def write_average(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Write the mean with one more member, without accepting it."""
        self._write([*self._members, (ingredient, weight)])

    def accept(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Make an adapter a member."""
        self._members.append((ingredient, weight))

    def _write(self, members: list[tuple[Ingredient, float]]) -> None:
        if len(members) == 1:
            self.write_single(members[0][0])
        else:
            average_adapters(members, self._rank, self.state_dict)
            self._written()

    def _written(self) -> None:
        if self._after is not None:
            self._after(self.state_dict)


def candidate_for(
    ingredients: Sequence[Ingredient],
    into: dict[str, Tensor] | None,
    after_average: Callable[[dict[str, Tensor]], None] | None,
    rank: int | None,
) -> Candidate | AdapterCandidate:
    """Return the candidate into which averages of these ingredients are written."""
    kind, rank = ingredients[0].kind, checked(rank, int | None, "soup", "rank", low=1)
    unfit = ("into", into) if kind == ADAPTER else ("rank", rank)
    if unfit[1] is not None:
        only = "whole models" if kind == ADAPTER else "adapters"
        rule = f"{unfit[0]} must be given for {only} only, got {'it' if kind == ADAPTER else rank} for {kind}s"
        raise ConfigError("soup", rule, "leave it out")
    return AdapterCandidate(rank, after_average) if kind == ADAPTER else Candidate(ingredients[0], into, after_average)
