"""Averages of LoRA adapters: of their products BA, never of A and B apart.

The adapter of a PEFT model in training is replaced by averages of other ranks.
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
    """The state dict of an adapter under PEFT's names, with what its config must be."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        """The fields of ``adapter_config.json``; ``LoraConfig(**config)`` takes them."""
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

    A's are stacked, and B's beside each other, so the rank is the sum of the members'; equal members are stacked once,
    so that their mean keeps its bits. The weight lies in alpha if it is the same for all: then no B is rounded anew.
    Biases and modules that are trained whole are averaged as in a model.

    Args:
        members: Adapters, each with its weight; dtypes and config come from the first.
        rank: Cut each layer to the best approximation of this rank (by SVD), if it is larger.
        into: What to write the result into.

    Source: stacking is exact algebra; Eckart & Young, 1936, for the cut.
    """
    first = members[0][0]
    soup = AdapterWeights() if into is None else into
    soup.clear()
    soup.config, soup.errors, soup.error = dict(first.config), {}, 0.0
    # fsum rounds once: the total does not depend on the order of the members.
    total = math.fsum(weight for _, weight in members)
    layers = lora_layers(first)
    of_layers = {key for layer in layers for key in (layer.a, layer.b, layer.bias)}
    # PEFT saves more than factors (modules_to_save, trained token rows), whose plain mean is right.
    for key in first.specs:
        if key not in of_layers:
            soup[key] = _mean(key, members, [1.0] * len(members))
    ranks: dict[str, tuple[int, float]] = {}
    lost, whole, changed = 0.0, 0.0, False
    for layer in layers:
        parts = _parts(layer, members)
        # One distinct pair of factors needs no stacking: equal members, or a soup of one, keep bits and rank.
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
        # copy: a soup of equal members would otherwise hold the ingredient's mapped memory, which close() lets go
        soup[layer.a] = factors.a.to(first.spec(layer.a).dtype, copy=True).contiguous()
        soup[layer.b] = factors.b.to(first.spec(layer.b).dtype, copy=True).contiguous()
        ranks[layer.module] = (factors.a.shape[0], factors.scale)
        if first.has(layer.bias):
            # LoRA computes s(BAx + b), and the saved scale is the soup's: s_i b_i is what is averaged.
            shares = [scaling(adapter.config, layer.module) / factors.scale for adapter, _ in members]
            soup[layer.bias] = _mean(layer.bias, members, shares)
    soup.error = math.sqrt(lost / whole) if whole else 0.0
    if changed:
        soup.config.update(_config_of(ranks))
    for adapter, _ in members:
        # Opened again when next read: memory maps of all members at once would count against the host.
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
        # The scale enters after the widening: a 16-bit product would round it a second time.
        tensor = tensor.to(accumulator_dtype(tensor.dtype)) * scale
        total += weight
        mean = tensor if mean is None else mean_with_(mean, mean, tensor, weight, total)
    return torch.as_tensor(mean).to(first.spec(key).dtype)


def _parts(layer: LoraLayer, members: Sequence[tuple[Ingredient, float]]) -> list[tuple[_Factors, float]]:
    """Return the factors of a layer with their weights, equal ones once."""
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
    # sum_i w_i s_i B_i A_i = [w_1 s_1 B_1 | ... | w_n s_n B_n] [A_1; ...; A_n]: exact, and the ranks add up. The mean
    # of the A's times the mean of the B's is another matrix, with cross terms B_i A_j.
    shares = [weight * factors.scale for factors, weight in parts]
    # The first share other than 0 becomes the scale, so that its B keeps its bits and the others hold ratios to it.
    unit = next((share for share in shares if share), 1.0)
    dtype = accumulator_dtype(parts[0][0].b.dtype)
    return _Factors(
        # A is (rank, in, ...): ranks lie along dimension 0. B is (out, rank, ...): along dimension 1.
        torch.cat([factors.a.to(accumulator_dtype(factors.a.dtype)) for factors, _ in parts], 0),
        torch.cat([factors.b.to(dtype) * (share / unit) for (factors, _), share in zip(parts, shares, strict=True)], 1),
        unit / total,
    )


def _norm(factors: _Factors) -> float:
    # ‖BA‖² = tr(BᵀB AAᵀ): the product, which is as large as the layer's weight, is not formed
    a, b = factors.a.double().flatten(1), factors.b.double().flatten(1)
    return factors.scale * math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))


def _cut(factors: _Factors, rank: int, scale: float) -> tuple[_Factors, float]:
    """Return the nearest product of a lower rank, and its distance; the SVD is of the small core ``R_b R_a^T``."""
    # Convolutions: A is (rank, in, kh, kw), B is (out, rank, 1, 1). Flattened they multiply as matrices.
    a, b = factors.a.double().flatten(1), factors.b.double().flatten(1)
    # b a = Q_b (R_b R_a^T) Q_a^T with Q_a (in, r) and Q_b (out, r). An SVD of the r by r core is one of the product
    # (Eckart-Young: its first values give the nearest matrix of that rank), in O((in + out) r^2) operations.
    q_a, r_a = torch.linalg.qr(a.T)
    q_b, r_b = torch.linalg.qr(b)
    u, values, v = torch.linalg.svd(factors.scale * r_b @ r_a.T)
    # B starts with most of the size where training starts: split evenly. The first one's scale stays, so that a model
    # built for this rank takes the factors as they are.
    scale = scale if scale > 0 else 1.0
    # scale B A must give u diag(values) v: each factor takes sqrt(values / scale).
    root = (values[:rank] / scale).sqrt()
    rank = root.numel()
    new_a = (root[:, None] * (v[:rank] @ q_a.T)).reshape(rank, *factors.a.shape[1:])
    # The distance to the nearest matrix of that rank is the norm of the values that are cut.
    new_b = (q_b @ u[:, :rank] * root).reshape(-1, rank, *factors.b.shape[2:])
    return _Factors(new_a, new_b, scale), float(values[rank:].norm())


def _config_of(ranks: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return the config fields that give each layer its rank and scale."""
    wanted = {module: (rank, _whole(scale * rank)) for module, (rank, scale) in ranks.items()}
    # The pair that most layers have becomes the config's own; the patterns then name the exceptions only.
    (usual_rank, usual_alpha), _ = Counter(wanted.values()).most_common(1)[0]
    names = {module: f"^{re.escape(module)}" for module in wanted}  # PEFT takes patterns from the end of a name
    return {
        "r": usual_rank,
        "lora_alpha": usual_alpha,
        "rank_pattern": {names[module]: rank for module, (rank, _) in wanted.items() if rank != usual_rank},
        "alpha_pattern": {names[module]: alpha for module, (_, alpha) in wanted.items() if alpha != usual_alpha},
        # With rsLoRA, PEFT would divide alpha by sqrt(r). Scales are given as alpha / r here. The fields below ask
        # for initialisations from data or a quantised base (LoftQ, EVA), which a loaded soup must not run again.
        "use_rslora": False,
        "init_lora_weights": True,
        "loftq_config": {},
        "eva_config": None,
    }


def _whole(number: float) -> float:
    # alpha = scale * rank comes back with rounding error, and PEFT's own configs hold it as an integer.
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


def adapter_of(model: nn.Module) -> PeftAdapter | None:
    """Return the adapter of the PEFT model that this is, or has in it; None if it has none."""
    peft = sys.modules.get("peft")  # without it there is no such model
    found = [] if peft is None else [
        (name, module) for name, module in model.named_modules() if isinstance(module, peft.PeftModel)
    ]  # fmt: skip
    if not found:
        # lora_A without a PeftModel: layers were injected, and there is no config to read scales from.
        odd = next((name for name, module in model.named_modules() if hasattr(module, "lora_A")), None)
        if odd is None:
            return None
        rule = f"adapters must be those of a PeftModel, got PEFT's layer {odd!r} in {type(model).__name__}"
        raise CompatibilityError("soup", rule, "make the model by peft.get_peft_model")
    if len(found) > 1:
        rule = f"model must hold one PeftModel, got {', '.join(repr(name) for name, _ in found)}"
        raise CompatibilityError("soup", rule, "average their saved adapters with `eff soup`, each model's for itself")
    return PeftAdapter(model, *found[0])


class PeftAdapter:
    """Reads and replaces the one adapter of a PEFT model, and what else of the model its checkpoints hold."""

    def __init__(self, model: nn.Module, name: str, peft_model: Any) -> None:
        self._model, self._peft = model, peft_model
        self._prefix = f"{name}." if name else ""
        # Lightning's checkpoints hold these too, PEFT's own do not
        inner = [key for key, _ in peft_model.named_buffers()] if name else []
        self._outer = [
            key
            for key in model.state_dict()
            if not key.startswith(self._prefix) or key.removeprefix(self._prefix) in inner
        ]
        self._name, *others = list(peft_model.peft_config)
        kind = str(getattr(self._config.peft_type, "value", self._config.peft_type))
        if others or kind != "LORA" or self._config.is_prompt_learning:
            got = f"{[self._name, *others]}" if others else f"{kind}, whose averages are not those of what it does"
            rule = f"PEFT model must have one adapter, of LoRA, got {got}"
            raise CompatibilityError("soup", rule, "delete the others, or leave soup out")
        present = Ingredient("the model's adapter", ADAPTER, None, self.weights, self.fields())
        check_adapters(present, present)

    @property
    def _config(self) -> Any:
        return self._peft.peft_config[self._name]

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``adapter_config.json``."""
        fields = self._config.to_dict()
        # The config keeps target_modules as a set, whose order differs between processes; JSON has no sets.
        return {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}

    def weights(
        self, state_dict: Mapping[str, Tensor] | None = None, like: Ingredient | None = None
    ) -> dict[str, Tensor]:
        """Return the adapter under PEFT's names, and what else checkpoints hold."""
        from peft import get_peft_model_state_dict

        whole = self._model.state_dict() if state_dict is None else state_dict
        inner = {key.removeprefix(self._prefix): value for key, value in whole.items() if key.startswith(self._prefix)}
        # by itself it may ask the Hub whether the base model's vocabulary has changed
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
        """Give the model this adapter, of whatever rank; parameters of a new shape are new ones."""
        # Ranks and scales go into layers first: `set_peft_model_state_dict` refuses other shapes.
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
        # In place, through the model's own tensors: what the trainer wrapped around the model still points to them.
        for key in self._outer:
            own[key].copy_(weights[key])


def _resize(layer: Any, name: str, rank: int) -> None:
    # dimension is where the factor's rank lies: 0 in A, 1 in B.
    for holder, dimension in (("lora_A", 0), ("lora_B", 1)):
        if name in getattr(layer, holder):
            inner = getattr(layer, holder)[name]
            _set_rank(inner, "weight", inner.weight, dimension, rank)
            kind = "features" if hasattr(inner, "out_features") else "channels"
            setattr(inner, f"{('out', 'in')[dimension]}_{kind}", rank)
        # An adapter of an embedding holds bare parameters in `lora_embedding_A`, not modules.
        embedding = getattr(layer, holder.replace("_", "_embedding_"), {})
        if name in embedding:
            _set_rank(embedding, name, embedding[name], dimension, rank)


def _set_rank(holder: Any, name: str, old: Tensor, dimension: int, rank: int) -> None:
    shape = (*old.shape[:dimension], rank, *old.shape[dimension + 1 :])
    # A new Parameter, uninitialised: `set_peft_model_state_dict` fills it next.
    if shape != tuple(old.shape):
        setattr(holder, name, nn.Parameter(old.new_empty(shape), requires_grad=old.requires_grad))


class AdapterCandidate:
    """Candidates of a soup of models, as `averaging.Candidate`: one state dict takes every average of adapters."""

    def __init__(self, rank: int | None, after_average: Callable[[dict[str, Tensor]], None] | None) -> None:
        self._rank, self._after = rank, after_average
        self._members: list[tuple[Ingredient, float]] = []
        self.state_dict = AdapterWeights()

    def write_single(self, ingredient: Ingredient) -> str | None:
        """Write one adapter as it is; return the name of a tensor with a NaN or an infinity, if there is one."""
        self.state_dict.clear()
        self.state_dict.config, self.state_dict.errors, self.state_dict.error = dict(ingredient.config), {}, 0.0
        for key in (*ingredient.specs, *ingredient.ties):
            self.state_dict[key] = ingredient.tensor(key).clone()
        ingredient.close()
        self._written()
        return next((key for key, value in self.state_dict.items() if not copy_finite_(None, value)), None)

    def begin_mean(self, best: Ingredient, weight: float = 1.0) -> None:
        """Start from the best adapter, whose dtypes and config the soup takes."""
        # No running mean: a product of stacked factors cannot be updated in place.
        self._members = [(best, weight)]

    def write_mean(self) -> None:
        """Write the mean of the members accepted so far; of one, itself."""
        self._write(self._members)

    def write_average(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Write what the mean would be with one more member."""
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
    """Return where averages of these ingredients are written."""
    kind, rank = ingredients[0].kind, checked(rank, int | None, "soup", "rank", low=1)
    unfit = ("into", into) if kind == ADAPTER else ("rank", rank)
    if unfit[1] is not None:
        only = "whole models" if kind == ADAPTER else "adapters"
        rule = f"{unfit[0]} must be given for {only} only, got {'it' if kind == ADAPTER else rank} for {kind}s"
        raise ConfigError("soup", rule, "leave it out")
    return AdapterCandidate(rank, after_average) if kind == ADAPTER else Candidate(ingredients[0], into, after_average)
