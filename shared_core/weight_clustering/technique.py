"""Weight clustering during training: from one step on, all weights of a cluster are one trained value.

Also selects the weights to share, their bits, and why others are not shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import all_reduce_, local_part
from shared_core.distributed.sharded_tensors import fill_, is_sharded, part_of, reshard_, whole, whole_of
from shared_core.engine.checks.claims import Claim, FewValues, Where
from shared_core.engine.checks.model_guards import is_element_wise
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CheckpointError, MatchError, by_reason, require
from shared_core.modules.matching import (
    Matched,
    StackedExperts,
    chosen_modules,
    match_modules,
    plain_name,
)
from shared_core.modules.own_forward import why_computed
from shared_core.modules.weight_views import PACKED, weights_of
from shared_core.numerics.deferred_checks import copied_to_cpu
from shared_core.printing import amount, counted, size_text
from shared_core.pruning.masks import WEIGHTS, clear_moments_, refuse_sparse
from shared_core.pruning.targets import Targets, prunable_types, refuse_adapters
from shared_core.weight_clustering.clustering import (
    SHARED_DTYPES,
    Bundle,
    Bundles,
    put_values_,
    share_values,
    summed_by_code,
    wide,
)
from shared_core.weight_clustering.config import MAX_BITS, ClusterConfig


@dataclass(frozen=True)
class SharedTargets(Targets):
    """The weights to cluster, and the bits of the codes of each."""

    bits: dict[str, int] = field(default_factory=dict)


def find_shared(model: nn.Module, config: ClusterConfig) -> SharedTargets:
    """Return the weights to share, of linear, convolutional, embedding and packed layers and stacks of experts, once.

    Each tensor has its own values: a recurrent layer has as many sets of them as weights, all experts of a stack share
    one.

    A tied tensor is shared only if all its modules are chosen, and a frozen one only if `config.include` names its
    module. Never shared are computed weights, other dtypes than float16, bfloat16, float32 and float64, and embeddings
    with sparse gradients or ``max_norm``.
    """
    types = (*prunable_types(model), nn.Embedding, *PACKED, StackedExperts)
    chosen = chosen_modules(config, model, types, where="cluster")
    widths = [
        ({found.module for found in match_modules(model, types, where="cluster: bits_of", include=[pattern])}, bits)
        for pattern, bits in config.widths().items()
    ]
    is_chosen = {found.module for found in chosen}
    holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    # All holders of each parameter: a tied one may only change if all its modules are chosen.
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = f"{plain_name(module_name)}.{name}".removeprefix(".")
                holders.setdefault(parameter, []).append((whole, module))

    targets = SharedTargets({}, {})
    for found, own in [(one, own) for one in chosen for own in _weights_in(one)]:
        name = f"{found.name}.{own}".removeprefix(".")
        weight = found.module._parameters.get(own)
        if weight is None:
            targets.left_out[name] = "computed, by weight norm or another parametrization"
        # Only under its first name, because a tied weight appears once per module.
        elif name != holders[weight][0][0]:
            continue  # handled under its first name
        elif outside := next((held for held, module in holders[weight] if module not in is_chosen), None):
            targets.left_out[name] = f"shared with {outside}, which is not chosen"
        elif weight.numel() < config.min_size:
            targets.left_out[name] = "left out by min_size"
        elif weight.dtype not in SHARED_DTYPES:
            targets.left_out[name] = f"not a float of 16 to 64 bits ({weight.dtype})"
        elif getattr(found.module, "sparse", False) or getattr(found.module, "max_norm", None) is not None:
            targets.left_out[name] = "an embedding with sparse gradients, or one that is normalized in forward"
        elif computed := next(filter(None, map(why_computed, (held for _, held in holders[weight]))), None):
            targets.left_out[name] = f"{type(found.module).__name__}: {computed}"
        elif not weight.requires_grad and not config.include:
            targets.left_out[name] = "frozen; name its module in include to share its weights"
        else:
            targets.modules[name] = found.module
            # The first match of bits_of wins.
            targets.bits[name] = next((bits for modules, bits in widths if found.module in modules), config.bits)
    reasons = by_reason(targets.left_out) or "tied to others"
    rule = f"must find at least one weight to share, but all were left out ({reasons})"
    require(targets.modules, "cluster", rule, "", MatchError)
    return targets


def _weights_in(found: Matched) -> Iterable[str]:
    """Return the names of the weights of a matched layer, or of one whose weight is computed from others."""
    return (found.parameter,) if found.parameter else weights_of(found.module) or ("weight",)


NOTE = "The weights stay floats with few distinct values. `eff compress` writes the small file without loss."


class WeightClustering(Technique):
    """Clusters the weights of each layer at `begin` and trains the centroids (Han, Mao and Dally 2016, section 3.3).

    The first weight of a cluster represents its centroid. Before each optimizer step it gets the sum of its members'
    gradients and the others get zero, so that gradient clipping uses the norm of the centroids. After the step the
    others are set to its exact value. So any optimizer trains centroids, and the only extra state is the cluster of
    each weight. Zeros belong to no cluster and stay +0.0.

    Args:
        config: The options.
    """

    config: ClusterConfig

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._targets = SharedTargets({}, {})
        self._weights: dict[str, nn.Parameter] = {}
        self._codes: dict[str, Tensor] = {}
        """0 for a zero, i for the i-th cluster, in the weight's shape and on its device. Sharded like the weight."""
        self._bundles = Bundles()
        self._gathered: dict[str, Tensor] | None = None
        self._counted: list[dict[str, Any]] = []
        self._errors: dict[str, float] = {}
        self._num_values = 0
        self._begin = 0
        self._clustered_at = -1

    def attach(self, context: Context) -> Touched:
        """Find the weights to share."""
        model = context.model
        context.undo.callback(self._detach)
        self._targets = find_shared(model, self.config)
        refuse_adapters(
            "cluster", model, self._targets.modules, "merging would give members of a cluster different values",
            "merge first, and share the weights of the merged model",
        )  # fmt: skip
        context.projections.append(self._tie)
        return self._targets.touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Leave weights unchanged that no optimizer holds."""
        self._targets = self._targets.without(context.unheld, "cluster", "share")
        return self._targets.touched()

    def plan(self, context: Context) -> Plan:
        """Return when weights are clustered."""
        self._begin, _ = context.resolve_range(self.config.begin, self.config.begin, "cluster")
        # Pruning comes before this technique and has already planned its end.
        first, got = context.first_usable_step, f"got {self.config.begin!r} = step {self._begin}"
        rule = f"begin must not lie before step {first}, when weights are pruned for the last time, {got}"
        require(self._begin >= first, "cluster", rule, "begin later")
        return Plan(
            [(self._begin, f"weights are clustered, {2**self.config.bits} values per tensor, and clusters train on")],
            missing="" if self._codes else f"weights are not shared yet, clustering is at step {self._begin}",
            usable_from=self._begin,
            guards=self._weights,
        )

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve `begin`, then restore saved clusters, or make them if they are due."""
        if state is not None:
            self._restore(state)
        self.plan(context)
        self._weights = self._targets.weights()
        for optimizer in context.optimizers:
            if not is_element_wise(optimizer):
                context.services.say(
                    f"efftrain: cluster: {type(optimizer).__name__} may use whole gradients in its step, so the "
                    "update of each shared value depends on the position of its first weight. With element-wise "
                    "optimizers (AdamW, SGD) it does not"
                )
        self._bundles, self._num_values = Bundles(), 0
        if self._codes:
            self._set_codes(self._codes)
            self._tie()
        elif context.step >= self._begin:
            self._cluster(context)

    @torch.no_grad()
    def before_step(self, context: Context) -> None:
        """Give each centroid the sum of its members' gradients."""
        gradients = {name: grad for name in self._codes if (grad := self._weights[name].grad) is not None}
        refuse_sparse("cluster", gradients.values())
        parts = {name: local_part(gradient) for name, gradient in gradients.items()}
        rows = [(bundle, bundle.flat(parts)) for bundle in self._bundles.of(parts)]
        # dL/dc is the sum of the gradients of all weights that hold c (Han et al., section 3.3, equation 3).
        summed = [(bundle, summed_by_code(flat, bundle.codes, bundle.num_values)) for bundle, flat in rows]
        for (bundle, flat), sums in zip(rows, self._collected(summed), strict=True):
            # Each centroid is represented by its first member, which gets the whole sum, while the others get zero. So
            # the optimizer only moves the first members, and norm clipping counts each sum once.
            flat.zero_()
            # index_copy_: of a sharded weight, only the process that holds a first member writes there.
            flat.index_copy_(0, bundle.first, (sums if bundle.is_whole else sums[bundle.of]).to(flat.dtype))
            bundle.put_(flat, parts)

    def after_step(self, context: Context, applied: bool) -> None:
        """Cluster the weights if that is due, otherwise set every weight to its centroid."""
        if not applied:
            return
        if not self._codes and context.step >= self._begin:
            self._cluster(context)
        else:
            self._tie()

    def finish(self, context: Context) -> None:
        """Set weights to their centroids. A run that ended before `begin` keeps its weights."""
        # The trainer may have loaded other weights after the last step.
        reshard_(context.model)
        self._tie()
        if any(map(is_sharded, self._weights.values())):
            self._gathered, self._counted = self._whole_codes(), self._tensors(gather=True)

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return the claim that each weight has at most as many values as its bits allow."""
        shared = [entry for entry in self.report()["tensors"] if entry["name"] in self._codes]
        return {entry["name"]: FewValues(2 ** entry["bits"], entry["values"], holds=Where.TRAINED) for entry in shared}

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Gather the clusters of sharded weights, so that saving needs no other process."""
        if purpose == "evaluate":
            yield
            return
        self._gathered = self._whole_codes()
        try:
            yield
        finally:
            self._gathered = None

    def _whole_codes(self) -> dict[str, Tensor]:
        return {name: whole_of(codes, self._weights.get(name)) for name, codes in self._codes.items()}

    def _detach(self) -> None:
        """Release the weights. The clusters stay readable, except after a crash with sharded weights."""
        # A part of the codes is useless without the others.
        if any(map(is_sharded, self._weights.values())):
            self._codes = {}
        self._codes = {name: codes.cpu() for name, codes in (self._gathered or self._codes).items()}
        self._weights, self._bundles, self._gathered = {}, Bundles(), None

    def state_dict(self) -> dict[str, Any]:
        """Return the clusters, one or two bytes per weight, and when they were made."""
        codes = self._whole_codes() if self._gathered is None else self._gathered
        return {"codes": dict(codes), "clustered_at": self._clustered_at, "errors": dict(self._errors)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Check a saved state. Its clusters are moved to the weights' devices later."""
        codes, weights = dict(state["codes"]), self._targets.weights()
        odd = sorted(set(codes) ^ set(weights)) if codes else []
        # Compared with the current weights. Dtypes and ranges are also checked, because files may be damaged.
        odd += [name for name, saved in codes.items() if not odd and not _fits(saved, weights[name])]
        rule = f"saved clusters must match this model's weights, got a difference at {', '.join(odd[:1])}"
        remedy = "resume with the model and recipe that wrote the checkpoint"
        require(not odd, "cluster", rule, remedy, CheckpointError)
        self._codes = codes
        self._clustered_at = int(state["clustered_at"])
        self._errors = {name: float(error) for name, error in state["errors"].items()}

    def figures(self) -> dict[str, float]:
        """Return ``cluster/values``, the total number of distinct shared values."""
        return {"cluster/values": float(self._num_values)}

    def report(self) -> dict[str, Any]:
        """Return the distinct nonzero values of each tensor, counted in the weights, and the size of their codes."""
        # Sharded weights are counted when the run has ended.
        tensors = self._counted or self._tensors()
        return {
            "tensors": tensors,
            "bytes": sum(entry["bytes"] for entry in tensors),
            "code_bytes": sum(entry["code_bytes"] for entry in tensors),
            "begin_step": self._begin,
            "clustered_at_step": self._clustered_at,
            "left_out": dict(self._targets.left_out),
            "note": NOTE,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        tensors = report["tensors"]
        if report["clustered_at_step"] is None:
            return [f"Shared no weights yet: clustering begins at step {report['begin_step']:,}."]
        most = max((entry["values"] for entry in tensors), default=0)
        weights = amount(sum(entry["numel"] for entry in tensors))
        sizes = f"{size_text(report['code_bytes'])} instead of {size_text(report['bytes'])}"
        return [
            f"{weights} weights in {counted(len(tensors), 'layer')} share at most {counted(most, 'value')} a layer, "
            f"since step {report['clustered_at_step']:,}. As codes they take {sizes}.",
            report["note"],
        ]

    def _tensors(self, *, gather: bool = False) -> list[dict[str, Any]]:
        tensors = []
        for name, weight in self._targets.weights().items():
            if is_sharded(weight) and not gather:
                continue
            numbers = wide(whole(weight.detach()))
            # Counted in the weights, because clusters may have become equal.
            live = numbers[numbers != 0]
            values = len(np.unique(live))
            item = weight.element_size()
            # Bits for a code of values - 1. Zeros are not stored, because a compressed file has a bitmap for them.
            width = max(values - 1, 1).bit_length() if values else 0
            entry = {"name": name, "shape": list(weight.shape), "numel": weight.numel(), "nonzero": len(live)}
            sizes = {"bytes": weight.numel() * item, "code_bytes": -(-len(live) * width // 8) + values * item}
            report = {"bits": self._targets.bits[name], "values": values, "rms_error": self._errors.get(name)}
            tensors.append({**entry, **report, **sizes})
        return tensors

    def _cluster(self, context: Context) -> None:
        codes = {}
        with torch.no_grad():
            there = copied_to_cpu(whole(weight) for weight in self._weights.values())
            for (name, weight), numbers in zip(self._weights.items(), there, strict=True):
                shared = share_values(numbers, self._targets.bits[name], name=f"cluster: {name}")
                new = shared.weight()
                # Convert to float64 before subtracting: in float32 the error of close values would be rounding.
                difference = wide(numbers).astype("float64") - wide(new)
                self._errors[name] = float((difference**2).mean() ** 0.5)
                fill_(weight, new)
                codes[name] = shared.codes
        self._set_codes(codes)
        self._clustered_at = context.step
        # Others (running averages) must apply the new projection to their copies.
        context.projection_changes += 1
        self._restart(context)

    def _set_codes(self, codes: Mapping[str, Tensor]) -> None:
        self._codes, singles = {}, []
        there = copied_to_cpu(codes[name] for name in self._weights)
        for (name, weight), flat in zip(self._weights.items(), (found.view(-1) for found in there), strict=True):
            count = int(flat.max()) if flat.numel() else 0
            # The first position of each code: the smallest index among its members, with one scatter.
            places = torch.full((count + 1,), flat.numel(), dtype=torch.int64)
            places.scatter_reduce_(0, flat.long(), torch.arange(flat.numel()), "amin")
            # If no weight has a code below the largest, no member would carry its centroid.
            is_full = not count or int(places[1:].max()) < flat.numel()
            rule = f"saved clusters of {name} must have members, got an empty one"
            require(is_full, "cluster", rule, "", CheckpointError)
            first, of = places[1:], torch.arange(count)
            if is_sharded(weight):
                # Mark in the whole weight, then split like the weight, so each process learns which first members it
                # holds.
                marked = torch.zeros(flat.numel(), dtype=torch.int64)
                marked[first] = of + 1
                mine = part_of(marked.view(weight.shape).to(weight.device), weight).reshape(-1)
                first = mine.nonzero().view(-1)
                # Sorted by cluster, so that sums and first members are in the same order.
                of, order = (mine[first] - 1).sort()
                first = first[order]
            first, of, new = (tensor.to(weight.device, non_blocking=True) for tensor in (first, of, codes[name]))
            self._codes[name] = part_of(new, weight)
            singles.append(Bundle((name,), self._codes[name].reshape(-1), first, of, count))
        self._bundles = Bundles(singles, self._weights)
        self._num_values = self._bundles.num_values

    def _collected(self, values: list[tuple[Bundle, Tensor]]) -> list[Tensor]:
        """Return sums over the parts of sharded weights, with one collective for all of them."""
        sharded = [found for bundle, found in values if is_sharded(self._weights[bundle.names[0]])]
        # Each process has a part of the gradients, so sums add up over processes.
        if not sharded:
            return [found for _, found in values]
        sums = iter(torch.split(all_reduce_(torch.cat(sharded), "sum"), [len(found) for found in sharded]))
        return [next(sums) if is_sharded(self._weights[bundle.names[0]]) else found for bundle, found in values]

    @torch.no_grad()
    def _tie(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        if not self._weights:
            return
        parts: dict[str, Tensor] = {}
        for name in self._codes:
            weight: Any = self._weights[name]
            part = local_part(weight) if values is None else values.get(weight)
            if part is not None:
                parts[name] = part
        rows = [(bundle, bundle.flat(parts)) for bundle in self._bundles.of(parts)]
        centroids = []
        for bundle, flat in rows:
            # The optimizer has moved the first members.
            found = flat.index_select(0, bundle.first)
            if not bundle.is_whole:
                # Zeros if other processes hold the first member. The sum over processes completes the row.
                found = flat.new_zeros(bundle.num_values).index_copy_(0, bundle.of, found)
            centroids.append((bundle, found))
        for (bundle, flat), shared in zip(rows, self._collected(centroids), strict=True):
            put_values_(flat, bundle.codes, shared.to(flat.dtype))
            bundle.put_(flat, parts)

    def _restart(self, context: Context) -> None:
        """Clear the optimizer state: it belonged to single weights, and a centroid starts anew."""
        # Weights in the optimizer state, such as an average, start as the shared ones.
        parts = {name: local_part(weight) for name, weight in self._weights.items()}
        nothing = {name: torch.zeros(part.shape, dtype=torch.bool) for name, part in parts.items()}
        clear_moments_(context.optimizers, self._weights, nothing)
        for optimizer in context.optimizers:
            for weight in self._weights.values():
                state = optimizer.state.get(weight, {})
                for key in WEIGHTS & state.keys():
                    state[key].copy_(weight.detach())
                if isinstance(state.get("step"), Tensor):
                    state["step"].zero_()  # Adam uses it to correct the bias of its cleared moments
                elif "step" in state:
                    state["step"] = 0


def _fits(codes: Tensor, weight: Tensor) -> bool:
    if codes.shape != weight.shape or codes.dtype not in (torch.uint8, torch.int16):
        return False
    return not codes.numel() or (int(codes.min()) >= 0 and int(codes.max()) <= 2**MAX_BITS)
