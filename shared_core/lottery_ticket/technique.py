"""One run of a lottery ticket experiment inside the user's own training: rewind, stay masked, find the next ticket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor, nn

from shared_core.distributed.collectives import from_main, is_main, local_part
from shared_core.distributed.sharded_tensors import is_sharded, reshard_, whole
from shared_core.engine.claims import Claim, Where, Zeros
from shared_core.engine.model_guards import refuse_lbfgs
from shared_core.engine.preview import Event, Touched
from shared_core.engine.receipt import figures
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.lottery_ticket.search import RunFolder
from shared_core.lottery_ticket.selection import layer_rates, most_of_a_tensor, next_masks, random_masks, redraw_
from shared_core.lottery_ticket.ticket import (
    Ticket,
    first_difference,
    fitting_rates,
    learning_rates,
    load_,
    own_tensors,
    read_ticket,
    renamed,
    set_learning_rates,
    whole_tensors,
)
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.masks import MaskStore, clear_moments_
from shared_core.pruning.selection import at_limit, count_kept, limit_notes
from shared_core.pruning.targets import Targets, find_targets, refuse_adapters

BIT_EQUAL = "bit-equal"


class LotteryTicket(Technique):
    """Trains dense, or a ticket, and writes the next ticket and the run's figures into ``out`` when it ends.

    Up to step k (`rewind_to`) the run is the user's, untouched, with its seeds and data order. At step k a dense run
    keeps its weights; a run with a ticket puts the ticket's weights in place (rewinding the weights these are what a
    dense run has at step k, so that nothing moves if the replay was exact, which is checked bit for bit), sets what the
    ticket prunes to exactly +0.0 and holds it there after every step, whatever momentum or weight decay would do.

    Args:
        config: The options.
    """

    key: ClassVar[str] = "lottery"
    config: LotteryConfig

    def __init__(self, config: LotteryConfig) -> None:
        super().__init__(config)
        self._folder = RunFolder(config.out)
        self._targets = Targets({}, {})
        self._weights: dict[str, nn.Parameter] = {}
        self._masks = MaskStore()
        self._rates: dict[str, float] | float = config.rate
        self._ticket: Ticket | None = None
        self._digest = ""
        self._at = 0
        self._rewound = False
        self._replay: str | None = None
        self._history: list[dict[str, Any]] = []
        self._learning_rates: tuple[tuple[float, ...], ...] = ()
        self._tuning_rates: Sequence[Sequence[float]] | None = None
        self._scheduled: tuple[tuple[Any, ...], ...] = ()
        self._result: dict[str, Any] = {}

    # -- before the first step

    def attach(self, model: nn.Module, context: Context) -> None:
        """Find the weights and read the ticket.

        Raises:
            MatchError: If there is nothing to prune.
            CheckpointError: If the ticket cannot be read, or the folder not written.
        """
        self.preview(model, context)
        if is_main():
            self._folder.make()

    def preview(self, model: nn.Module, context: Context) -> Touched:
        """Return the weights that tickets are of; make no folder."""
        config = self.config
        try:
            self._targets = find_targets(
                model, PruneConfig(sparsity=0.0, include=config.include, skip=config.skip, min_size=config.min_size)
            )
        except MatchError as error:
            raise MatchError(str(error).replace("prune:", "ticket:", 1)) from error
        refuse_adapters(
            "lottery", model, self._targets.modules, "merging would fill their zeros again",
            "merge, and find tickets of the merged model",
        )  # fmt: skip
        if config.scope == "local":
            self._rates = layer_rates(model, self._targets.modules, config)
        if config.ticket is not None:
            self._ticket = read_ticket(config.ticket)
            self._digest = self._ticket.digest()
            if self._ticket.rewind != config.rewind:
                raise CheckpointError(
                    f"lottery: {config.ticket} must be a ticket for rewind {config.rewind}, got one for "
                    f"{self._ticket.rewind}; find one with the same rewind"
                )
        self._check_most()
        return self.touched(model)

    def touched(self, model: nn.Module) -> Touched:
        """Return the weights that tickets are of."""
        return Touched.parameters(self._targets.weights().items(), self._targets.left_out)

    def _check_most(self) -> None:
        left = self._ticket.kept / self._ticket.numel if self._ticket else 1.0
        asked, most = 1 - left * (1 - self.config.rate), self.config.max_layer_sparsity
        if most is not None and most < asked - 1e-9:
            raise ConfigError(
                f"lottery: max_layer_sparsity must be at least what this run's ticket prunes, {asked:.4g}, got {most}"
            )

    def holds(self) -> Mapping[str, Tensor]:
        """Return the weights."""
        return self._weights

    def timeline(self, context: Context) -> list[Event]:
        """Return when the run rewinds, or keeps what later ones rewind to, and when its ticket is found."""
        config = self.config
        self._at = 0 if config.control == "random_reinit" else context.resolve(config.rewind_to, "lottery.rewind_to")
        if context.total_steps is not None and self._at >= context.total_steps:
            raise ConfigError(
                f"lottery: rewind_to must lie before the end of the run, {context.total_steps} steps, got "
                f"{config.rewind_to!r} = step {self._at}"
            )
        told = (
            f"masks of {config.ticket} go on, rewind {config.rewind}"
            if config.ticket
            else "weights to rewind to are kept"
        )
        return [(self._at, told), (None, "the next ticket is found")]

    def unreached(self, context: Context) -> str | None:
        """Return that the run has not rewound yet."""
        return None if self._rewound else f"weights are from before rewind_to, step {self._at}"

    def begin(self, context: Context) -> None:
        """Resolve step k; put masks back in a resumed run, or rewind now if k is 0.

        Raises:
            ConfigError: If step k is not before the end of the run.
            CheckpointError: If the ticket is of another model, or the folder holds a finished run.
        """
        config = self.config
        self.timeline(context)
        reshard_(context.model)  # a validation may have come before
        self._weights = self._masks.weights = self._targets.weights()
        refuse_lbfgs(context.optimizers, "lottery", "whose line search trains pruned weights within a step")
        if self._ticket is not None:
            self._ticket = renamed(self._ticket, self._weights, str(config.ticket))
            self._check_ticket(self._ticket, context)
        if context.step == 0:
            self._folder.check_unfinished()
        if context.step > self._at and not self._rewound:
            raise CheckpointError(
                f"lottery: checkpoint must be from before step {self._at}, or of a run that rewound there, got one of "
                f"step {context.step} that did not; start again"
            )
        if context.step == 0 and self._at == 0:
            self._rewind(context, others_begun=False)
        elif self._rewound:
            self._set_masks()
            self._masks.apply()
            if self._ticket is None and config.rewind == "weights":
                self._folder.check_kept(self._digest, self._at)

    def _check_ticket(self, ticket: Ticket, context: Context) -> None:
        if self.config.control == "random_reinit":
            return
        if ticket.step != self._at:
            raise CheckpointError(f"lottery: rewind_to must be the ticket's step {ticket.step}, got step {self._at}")
        if self.config.rewind == "none":
            fitting = fitting_rates(context.optimizers, ticket.learning_rates)
            if fitting is None:
                raise CheckpointError(
                    f"lottery: {self.config.ticket} must hold a learning rate for each parameter group, got "
                    f"{ticket.learning_rates}; train with the optimizer that it was found with"
                )
            self._tuning_rates = fitting

    # -- step k

    def _rewind(self, context: Context, *, others_begun: bool) -> None:
        self._rewound = True
        ticket, config = self._ticket, self.config
        if ticket is None:
            if config.rewind == "weights":  # of the others the next run needs those of the end
                kept = Ticket({}, whole_tensors(context.model), self._at)
                self._digest = from_main(kept.digest())
                if is_main():
                    self._folder.keep(kept)
            return
        self._set_masks()
        if config.control == "random_reinit":
            parameters = [parameter for parameter in context.model.parameters() if parameter.is_floating_point()]
            redraw_(parameters, self._drawn("weights"))
        elif config.rewind == "weights":
            odd = first_difference(own_tensors(context.model), ticket.weights, str(config.ticket))
            self._replay = BIT_EQUAL
            if odd is not None:
                self._replay = f"not bit-equal ({odd}), so the ticket's weights were loaded"
                load_(context.model, ticket.weights)
                context.services.say(f"efftrain: lottery: replay up to step {self._at}: {self._replay}")
        else:
            first_difference(own_tensors(context.model), ticket.weights, str(config.ticket))
            load_(context.model, ticket.weights)
            for optimizer in context.optimizers:
                optimizer.state.clear()  # it belongs to the weights of the replay
            if others_begun:
                context.weights_replaced()
        self._masks.apply()
        clear_moments_(context.optimizers, self._weights, self._masks.parts)

    def _set_masks(self) -> None:
        if self._ticket is None:
            return
        masks: Mapping[str, Tensor] = self._ticket.masks
        if self.config.control == "random_mask":
            masks = random_masks(masks, self._drawn("masks"))
        self._masks.set({name: masks[name].to(weight.device) for name, weight in self._weights.items()})

    def _drawn(self, what: str) -> torch.Generator:
        return torch.Generator().manual_seed(2 * self.config.seed + (what == "weights"))

    # -- one step

    def before_optimizer_step(self, context: Context) -> None:
        """Zero the gradients of pruned weights where they would move live ones; hold a fine-tuning's learning rate."""
        if self._masks and context.gradients_mix:
            parts = self._masks.parts
            pairs = [(local_part(w.grad), parts[name]) for name, w in self._weights.items() if w.grad is not None]
            for gradient, _ in pairs:
                if gradient.layout != torch.strided:
                    raise CompatibilityError("lottery: gradients must be dense, got a sparse one; use sparse=False")
            apply_mask_([gradient for gradient, _ in pairs], [mask for _, mask in pairs])
        if self.config.rewind == "none":
            self._scheduled = learning_rates(context.optimizers, lambda rate: rate)
            if self._rewound and self._tuning_rates is not None:
                set_learning_rates(context.optimizers, self._tuning_rates)
            self._learning_rates = learning_rates(context.optimizers)

    def after_optimizer_step(self, context: Context) -> None:
        """Rewind at step k; from then on set every pruned weight to +0.0."""
        self._restore_schedule(context)
        if context.step == self._at:
            self._rewind(context, others_begun=True)
        else:
            self._masks.apply()

    def skipped_optimizer_step(self, context: Context) -> None:
        """Nothing advances."""
        self._restore_schedule(context)

    def _restore_schedule(self, context: Context) -> None:
        # A scheduler that computes each rate from the one before must find its own.
        if self._scheduled:
            set_learning_rates(context.optimizers, self._scheduled)
            self._scheduled = ()

    def weights_replaced(self, context: Context) -> None:
        """Prune the new weights by the masks there are."""
        self._masks.apply()

    def evaluated(self, context: Context, metrics: Mapping[str, float | Tensor]) -> None:
        """Keep the figures of a validation, but not its times."""
        told = figures(metrics)
        if self._history and self._history[-1]["step"] == context.step:
            self._history[-1]["metrics"].update(told)
        else:
            self._history.append({"step": context.step, "metrics": told})

    # -- the end

    def finish(self, model: nn.Module, context: Context) -> None:
        """Write the ticket that this run found, and its figures last: a run without these is not finished.

        Raises:
            TrainingError: If the run did not reach step k, or its weights are NaN.
        """
        if not self._rewound:
            raise TrainingError(
                f"lottery: run must go on beyond rewind_to = step {self._at}, but its final weights are of step "
                f"{context.step}; rewind to an earlier step, or train longer"
            )
        self._masks.apply()
        unmeasured = self._evaluate(context)
        reshard_(model)
        tensors = [
            {
                "name": name,
                "numel": weight.numel(),
                "kept": weight.numel() - self._masks.num_pruned.get(name, 0),
                "nonzero": int(whole(weight.detach()).count_nonzero()),
            }
            for name, weight in self._weights.items()
        ]
        self._result = {
            "format": 1,
            "ticket": self.config.ticket,
            "control": self.config.control,
            "rewind": self.config.rewind,
            "rewind_step": self._at,
            "replay": self._replay,
            "step": context.step,
            "total_steps": context.total_steps,
            "numel": sum(entry["numel"] for entry in tensors),
            "kept": sum(entry["kept"] for entry in tensors),
            "tensors": tensors,
            "history": self._history,
            "unmeasured": unmeasured,
        }
        masks = self._next_masks(context) if self.config.control == "none" else None
        if masks is not None:
            self._result["found"] = sum(int(mask.count_nonzero()) for mask in masks.values())
            self._tell(masks, context)
        found = None if masks is None else self._found(masks, context)
        if is_main():
            self._folder.finish(self._result, found)

    def _evaluate(self, context: Context) -> str | None:
        """Measure the final weights unless that was done; return why it could not be."""
        if self._history and self._history[-1]["step"] == context.step:
            return None
        try:
            self.evaluated(context, context.services.evaluate())
        except ValueError as error:  # the Trainer's own, and CompatibilityError
            return str(error)
        return None

    def _next_masks(self, context: Context) -> dict[str, Tensor]:
        try:
            return next_masks(self._weights, self._masks, self._rates, self.config.max_layer_sparsity)
        except ConfigError as error:
            weights = {name: whole(weight.detach()) for name, weight in self._weights.items()}
            name = next((name for name, weight in weights.items() if weight.isnan().any()), "a weight")
            raise TrainingError(
                f"lottery: weights must be numbers, got NaN in {name} at step {context.step}; training has diverged: "
                "lower the learning rate, or clip gradients"
            ) from error

    def _tell(self, masks: Mapping[str, Tensor], context: Context) -> None:
        """Name the tensors of the ticket that was found of which next to nothing is left."""
        counts = {name: (mask.numel(), mask.numel() - count_kept(mask)) for name, mask in masks.items()}
        sparsity = 1 - self._result["found"] / sum(size for size, _ in counts.values())
        most = most_of_a_tensor(self.config.max_layer_sparsity, sparsity)
        capped = at_limit(most, sparsity, counts) if self.config.scope == "global" else []
        for note in limit_notes(self.key, most, capped, counts):
            context.note(note)

    def _found(self, masks: dict[str, Tensor], context: Context) -> Ticket:
        if self.config.rewind != "weights":
            return Ticket(masks, whole_tensors(context.model), self._at, self.config.rewind, self._learning_rates)
        if self._ticket is not None:
            return Ticket(masks, self._ticket.weights, self._at)
        return Ticket(masks, (is_main() and self._folder.kept_weights()) or {}, self._at)

    def claims(self, context: Context, report: Mapping[str, Any]) -> Mapping[str, Claim]:
        """Return that what the ticket prunes is 0."""
        counted = {entry["name"]: entry["numel"] - entry["nonzero"] for entry in report["tensors"]}
        packed = self._masks.packed().items()
        return {name: Zeros(mask, counted[name], holds=Where.TRAINED) for name, mask in packed}

    def detach(self, model: nn.Module) -> None:
        """Release masks and ticket."""
        self._weights, self._masks, self._scheduled = {}, MaskStore(), ()

    def state_dict(self) -> dict[str, Any]:
        """Return whether step k was reached, with which ticket, and the validations so far; masks lie in the ticket."""
        return {
            "rewound": self._rewound,
            "digest": self._digest,
            "replay": self._replay,
            "history": [{"step": entry["step"], "metrics": dict(entry["metrics"])} for entry in self._history],
            "learning_rates": [list(groups) for groups in self._learning_rates],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            CheckpointError: If the checkpoint is of a run with another ticket.
        """
        if self.config.ticket is not None and state["digest"] != self._digest:
            raise CheckpointError(
                f"lottery: checkpoint must be of a run with the ticket {self.config.ticket}, got one of another round; "
                "give every round an output folder of its own ({round} in the command stands for its name)"
            )
        self._digest, self._rewound = str(state["digest"]), bool(state["rewound"])
        self._replay = state["replay"]
        self._history = [{"step": int(e["step"]), "metrics": dict(e["metrics"])} for e in state["history"]]
        self._learning_rates = tuple(tuple(groups) for groups in state["learning_rates"])

    def metrics(self) -> dict[str, float]:
        """Return ``lottery/left``, the share of the weights within reach that is not pruned."""
        numel = sum(weight.numel() for weight in self._weights.values()) if self._masks else 0
        return {"lottery/left": (numel - sum(self._masks.num_pruned.values())) / numel if numel else 1.0}

    def report(self) -> dict[str, Any]:
        """Return what was trained, whether the replay was exact, per tensor how many weights are not zero."""
        if self._result:
            told = {name: value for name, value in self._result.items() if name not in ("format", "history")}
            return told | {"tensors": [self._recounted(entry) for entry in told["tensors"]]}
        return {"rewind_step": self._at, "replay": self._replay, "left_out": dict(self._targets.left_out)}

    def _recounted(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is told of a tensor with its weights counted now: what `qat` rounds to zero is zero too."""
        weight = self._weights.get(entry["name"])
        if weight is None or is_sharded(weight):
            return dict(entry)
        return {**entry, "nonzero": int(weight.detach().count_nonzero())}
