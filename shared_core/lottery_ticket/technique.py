"""One run of a lottery ticket experiment: rewind, train with masks, and find the next ticket.

A round prunes a share of the remaining weights, smallest first. Controls have random masks of the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import from_main, is_main
from shared_core.distributed.sharded_tensors import fill_, is_sharded, reshard_, whole
from shared_core.engine.checks.claims import Claim, Where, Zeros
from shared_core.engine.observers.history import numeric_metrics
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CheckpointError, MatchError, TrainingError, require
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.lottery_ticket.ticket import (
    HeldRates,
    RunFolder,
    Ticket,
    first_difference,
    load_,
    own_tensors,
    read_ticket,
    renamed,
    whole_tensors,
)
from shared_core.modules.matching import match_modules
from shared_core.modules.weight_views import CONVOLUTIONS
from shared_core.printing import amount, share_text
from shared_core.pruning.config import MOST_OF_WEIGHTS, PruneConfig
from shared_core.pruning.masks import MaskStore, clear_moments_, naming_nan, zeros_of_sharded
from shared_core.pruning.scorers import Magnitude
from shared_core.pruning.selection import (
    RankedScores,
    at_limit,
    count_kept,
    layer_limits,
    limit_notes,
    prune_mask,
    prune_masks,
)
from shared_core.pruning.targets import Targets, find_targets, prunable_types, refuse_adapters


def layer_rates(model: nn.Module, modules: Mapping[str, nn.Module], config: LotteryConfig) -> dict[str, float]:
    """Return the share of its remaining weights that each tensor loses in a round, for scope local.

    The output layer is the last linear or convolutional one in registration order, like ``last`` in `skip`. It loses
    `output_rate`, half of `rate` by default (Frankle and Carbin 2019, section 2). Convolutions lose `conv_rate`.
    """
    output = match_modules(model, prunable_types(model), where="lottery", include=["last"])[0].module
    # Frankle and Carbin prune the output layer at half the rate of the others.
    half = config.rate / 2 if config.output_rate is None else config.output_rate
    conv = config.rate if config.conv_rate is None else config.conv_rate
    return {
        name: half if module is output else conv if isinstance(module, CONVOLUTIONS) else config.rate
        for name, module in modules.items()
    }


class _Magnitude(Magnitude):
    zero_is_lowest: ClassVar[bool] = False  # a masked weight may have any value


@torch.no_grad()
def next_masks(
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    rates: Mapping[str, float] | float,
    most: float | None = None,
) -> dict[str, Tensor]:
    """Return the masks after pruning a share of the remaining weights, smallest magnitudes first.

    Of m remaining weights ``round(rate·m)`` are pruned (Python's rounding, halves to even), but never a tensor's last
    one. Among equal magnitudes the lowest flat index is kept. So r rounds of one rate leave ``(1 - rate)^r`` of the
    weights, except for rounding.

    Args:
        weights: The trained weights, any shapes and devices. If FSDP2 shards them, every process must call this.
        masks: Name → whole bool mask, True = kept. Empty means that all are kept.
        rates: Name → rate in [0, 1), for each tensor separately. Or one number, with one threshold for all.
        most: With one threshold, the largest share of one tensor that may be pruned in total. By default 0.98, or the
            overall share if that is higher.

    Returns:
        Name → bool mask, True = keep.

    Source: Frankle and Carbin 2019, arXiv:1803.03635.

    Example:
        >>> weight = {"w": torch.tensor([4.0, -1.0, 3.0, 2.0])}
        >>> first = next_masks(weight, {}, {"w": 0.25})
        >>> next_masks(weight, first, {"w": 0.4})["w"].tolist()
        [True, False, True, False]
    """
    scores = RankedScores(weights, masks, _Magnitude({}))
    held = dict(zip(masks, count_kept([*masks.values()]), strict=True))
    left = [held.get(name, weights[name].numel()) for name in scores.owners]
    if isinstance(rates, Mapping):
        found = {}
        for index, (name, count) in enumerate(zip(scores.owners, left, strict=True)):
            # Rates refer to the remaining weights, but `prune_mask` takes a share of all. Keep at least one weight.
            keep = max(count - round(rates[name] * count), min(count, 1))
            numel = weights[name].numel()
            found[name] = prune_mask(scores[index], (numel - keep) / max(numel, 1))
        return found
    numel = sum(tensor.numel() for tensor in scores.tensors)
    # Already pruned, plus the rate of the rest: the sparsity of all tensors together.
    sparsity = (numel - sum(left) + round(rates * sum(left))) / numel
    limits = layer_limits(most_of_a_tensor(most, sparsity), sparsity, [tensor.numel() for tensor in scores.tensors])
    return dict(zip(scores.owners, prune_masks(scores, sparsity, limits), strict=True))


def most_of_a_tensor(most: float | None, sparsity: float) -> float:
    """Return the largest share of one tensor that may be pruned for an overall `sparsity`. None selects the default."""
    return max(MOST_OF_WEIGHTS, sparsity) if most is None else most


def random_masks(masks: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return random masks that keep as many weights of every tensor as the given ones.

    Example:
        >>> masks = {"w": torch.tensor([True, False, False, True])}
        >>> int(random_masks(masks, torch.Generator().manual_seed(0))["w"].sum())
        2
    """
    drawn = {}
    for name, mask in masks.items():
        chosen = torch.randperm(mask.numel(), generator=generator)[: int(mask.count_nonzero())]
        drawn[name] = torch.zeros(mask.numel(), dtype=torch.bool).index_fill_(0, chosen, True).view(mask.shape)
    return drawn


@torch.no_grad()
def redraw_(parameters: Sequence[Tensor], generator: torch.Generator) -> None:
    """Shuffle the values of every parameter in place.

    If the model's code drew each element independently, the result follows the same distribution, without knowing it.
    Constants (zero biases, the ones of a norm) stay. If elements depend on each other (orthogonal initialization,
    pretrained weights), that structure is lost.

    Example:
        >>> weight = torch.tensor([1.0, 2.0, 3.0])
        >>> redraw_([weight], torch.Generator().manual_seed(1))
        >>> weight.sort().values
        tensor([1., 2., 3.])
    """
    for parameter in parameters:
        # A permutation of the initial values has exactly their distribution, for any initializer.
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        fill_(parameter, whole(parameter).reshape(-1)[order].view(parameter.shape))


BIT_EQUAL = "bit-equal"


class LotteryTicket(Technique):
    """Trains dense or with a ticket, and writes the next ticket and the run's metrics to ``out`` at the end.

    Up to step k (`rewind_to`) the run is unchanged, with the user's seeds and data order. At step k a dense run saves
    its weights. A run with a ticket loads the ticket's weights. With rewind ``weights`` these are the dense run's
    weights at step k, so nothing changes if the replay was exact, which is checked bit for bit. It then sets pruned
    weights to exactly +0.0 and keeps them there after every step, regardless of momentum or weight decay.

    Args:
        config: The options.
    """

    config: LotteryConfig

    def __init__(self, config: LotteryConfig) -> None:
        super().__init__(config)
        self._folder = RunFolder(config.out)
        self._targets = Targets({}, {})
        self._weights: dict[str, nn.Parameter] = {}
        self._masks = MaskStore("lottery")
        self._rates: dict[str, float] | float = config.rate
        self._ticket: Ticket | None = None
        self._digest = ""
        self._at = 0
        self._rewound = False
        self._replay: str | None = None
        self._history: list[dict[str, Any]] = []
        self._rates_held = HeldRates()
        self._result: dict[str, Any] = {}

    # -- before the first step

    def attach(self, context: Context) -> Touched:
        """Find the weights and read the ticket."""
        model = context.model
        context.undo.callback(self._detach)
        config = self.config
        try:
            self._targets = find_targets(
                model, PruneConfig(sparsity=0.0, include=config.include, skip=config.skip, min_size=config.min_size)
            )
        except MatchError as error:
            raise MatchError("ticket", error.rule, error.remedy) from error
        refuse_adapters(
            "lottery", model, self._targets.modules, "merging would fill their zeros",
            "merge first, and find tickets of the merged model",
        )  # fmt: skip
        if config.scope == "local":
            self._rates = layer_rates(model, self._targets.modules, config)
        if config.ticket is not None:
            self._ticket = read_ticket(config.ticket)
            self._digest = self._ticket.digest()
            rule = f"{config.ticket} must be a ticket for rewind {config.rewind}, got one for {self._ticket.rewind}"
            is_same = self._ticket.rewind == config.rewind
            require(is_same, "lottery", rule, "use a ticket with the same rewind", CheckpointError)
        left = self._ticket.kept / self._ticket.numel if self._ticket else 1.0
        asked, most = 1 - left * (1 - config.rate), config.max_layer_sparsity
        rule = f"max_layer_sparsity must be at least this ticket's target sparsity, {asked:.4g}, got {most}"
        require(most is None or most >= asked - 1e-9, "lottery", rule)
        context.projections.append(self._masks.apply)
        if is_main() and not context.is_preview:
            self._folder.make()
        return self._targets.touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Leave weights dense that no optimizer holds."""
        self._targets = self._targets.without(context.unheld, "lottery")
        return self._targets.touched()

    def plan(self, context: Context) -> Plan:
        """Return when the run rewinds, or saves the weights to rewind to, and when its ticket is found."""
        config = self.config
        self._at = 0 if config.control == "random_reinit" else context.resolve(config.rewind_to, "lottery.rewind_to")
        rule = f"the end of the run, {context.total_steps} steps, got {config.rewind_to!r} = step {self._at}"
        is_before = context.total_steps is None or self._at < context.total_steps
        require(is_before, "lottery", f"rewind_to must lie before {rule}")
        goes_on = f"masks of {config.ticket} are applied, rewind {config.rewind}"
        return Plan(
            [
                (self._at, goes_on if config.ticket else "weights to rewind to are saved"),
                (None, "the next ticket is found"),
            ],
            missing="" if self._rewound else f"rewind_to, step {self._at}, is not reached",
            guards=self._weights,
        )

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve step k, then restore masks in a resumed run, or rewind now if k is 0."""
        config = self.config
        if state is not None:
            self._restore(state)
        self.plan(context)
        reshard_(context.model)  # a validation may have run before
        self._weights = self._masks.weights = self._targets.weights()
        if self._ticket is not None:
            self._ticket = renamed(self._ticket, self._weights, str(config.ticket))
            self._check_ticket(self._ticket, context)
        if context.step == 0:
            self._folder.check_unfinished()
        rule = f"step {self._at}, or of a run that rewound there, got one of step {context.step} that did not"
        is_early = self._rewound or context.step <= self._at
        require(is_early, "lottery", f"checkpoint must be from before {rule}", "start again", CheckpointError)
        # Before other techniques begin, so that they see the ticket's weights as the initial ones.
        if context.step == 0 and self._at == 0 and not self._rewound:
            self._rewind(context, others_begun=False)
        elif not self._rewound:
            self._masks.set({})  # drop those of a later step, when an earlier state was loaded
        else:
            self._set_masks()
            self._masks.apply()
            if self._ticket is None and config.rewind == "weights":
                self._folder.check_kept(self._digest, self._at)

    def _check_ticket(self, ticket: Ticket, context: Context) -> None:
        # Random re-initialization starts at step 0, whatever the ticket's step.
        if self.config.control == "random_reinit":
            return
        rule = f"rewind_to must be the ticket's step {ticket.step}, got step {self._at}"
        require(ticket.step == self._at, "lottery", rule, "", CheckpointError)
        rule = f"{self.config.ticket} must hold a learning rate for each parameter group, got {ticket.learning_rates}"
        fits = self.config.rewind != "none" or self._rates_held.fit(context.optimizers, ticket.learning_rates)
        require(fits, "lottery", rule, "use the optimizer that the ticket was found with", CheckpointError)

    # -- step k

    def _rewind(self, context: Context, *, others_begun: bool) -> None:
        """Load the ticket's weights (Frankle and Carbin 2019, section 2: θ₀ ⊙ m; here θ_k ⊙ m)."""
        # Late rewinding (Frankle et al. 2020, arXiv:1912.05671) uses θ_k instead of θ₀, because large networks only
        # have winning tickets a few hundred steps after the start. The other kinds of rewinding keep the trained
        # weights θ_T.
        self._rewound = True
        if self._ticket is None:
            self._keep_weights(context)
            return
        self._set_masks()
        if self.config.control == "random_reinit":
            parameters = [
                parameter
                for parameter in context.model.parameters()
                if parameter.is_floating_point() and parameter not in context.unheld
            ]
            redraw_(parameters, self._drawn("weights"))
        # A replay of steps 0 .. k gives θ_k if the run is deterministic, which is checked.
        elif self.config.rewind == "weights":
            self._check_replay(context, self._ticket)
        else:
            self._load_trained(context, self._ticket, others_begun=others_begun)
        self._masks.apply()
        # The dense run's momentum would move pruned weights, and, through a norm of the update, live ones too.
        clear_moments_(context.optimizers, self._weights, self._masks.parts)

    def _keep_weights(self, context: Context) -> None:
        """Save the dense run's weights of step k if later runs rewind to them. The other rewindings need θ_T."""
        if self.config.rewind == "weights":
            kept = Ticket({}, whole_tensors(context.model), self._at)
            self._digest = from_main(kept.digest())
            if is_main():
                self._folder.keep(kept)

    def _check_replay(self, context: Context, ticket: Ticket) -> None:
        """Compare with the dense run bit for bit. An exact replay already has θ_k, and its optimizer moments."""
        odd = first_difference(own_tensors(context.model), ticket.weights, str(self.config.ticket))
        self._replay = BIT_EQUAL
        if odd is not None:
            self._replay = f"not bit-equal ({odd}), so the ticket's weights were loaded"
            load_(context.model, ticket.weights)
            context.services.say(f"efftrain: lottery: replay up to step {self._at}: {self._replay}")

    def _load_trained(self, context: Context, ticket: Ticket, *, others_begun: bool) -> None:
        """Load θ_T. The schedule is replayed from step k (Renda, Frankle and Carbin 2020, arXiv:2003.02389)."""
        first_difference(own_tensors(context.model), ticket.weights, str(self.config.ticket))  # checks the model
        load_(context.model, ticket.weights)
        for optimizer in context.optimizers:
            optimizer.state.clear()  # it belongs to the replayed weights
        if others_begun:
            context.report_weights_replaced()

    def _set_masks(self) -> None:
        if self._ticket is None:
            return
        masks: Mapping[str, Tensor] = self._ticket.masks
        if self.config.control == "random_mask":
            masks = random_masks(masks, self._drawn("masks"))
        self._masks.set({name: masks[name].to(weight.device) for name, weight in self._weights.items()})

    def _drawn(self, what: str) -> torch.Generator:
        # Two streams from one seed: masks and weights of controls are independent.
        return torch.Generator().manual_seed(2 * self.config.seed + (what == "weights"))

    # -- one step

    def before_step(self, context: Context) -> None:
        """Zero the gradients of pruned weights if they would move live ones, and hold the rates of a fine-tuning."""
        if self._masks and context.gradients_mix:
            self._masks.apply_to_gradients(context.optimizers)
        if self.config.rewind == "none":
            self._rates_held.hold(context.optimizers, rewound=self._rewound)

    def after_step(self, context: Context, applied: bool) -> None:
        """Rewind at step k. After that, set every pruned weight to +0.0."""
        # Held only for the step: schedulers compute the next rate from the current one.
        self._rates_held.give_back(context.optimizers)
        if not applied:
            self._masks.forget_gradients()
        elif context.step == self._at:
            self._rewind(context, others_begun=True)
        else:
            self._masks.hold(context.optimizers)

    def evaluated(self, context: Context, metrics: Mapping[str, float | Tensor]) -> None:
        """Record the metrics of a validation, without timings."""
        figures = numeric_metrics(metrics)
        if self._history and self._history[-1]["step"] == context.step:
            self._history[-1]["metrics"].update(figures)
        else:
            self._history.append({"step": context.step, "metrics": figures})

    # -- the end

    def finish(self, context: Context) -> None:
        """Write the ticket and, last, the metrics, which mark the run as finished."""
        rule = f"run must train beyond rewind_to = step {self._at}, but it ended at step {context.step}"
        require(self._rewound, "lottery", rule, "rewind to an earlier step, or train longer", TrainingError)
        self._masks.apply()
        unmeasured = self._evaluate(context)
        reshard_(context.model)
        self._result = self._figures(context, unmeasured)
        found = self._find(context) if self.config.control == "none" else None  # controls find no ticket
        if is_main():
            self._folder.finish(self._result, found)

    def _figures(self, context: Context, unmeasured: str | None) -> dict[str, Any]:
        """Return the content of ``round.json``."""
        tensors = [
            {
                "name": name,
                "numel": weight.numel(),
                "kept": weight.numel() - self._masks.num_pruned.get(name, 0),
                "nonzero": int(whole(weight.detach()).count_nonzero()),
            }
            for name, weight in self._weights.items()
        ]
        return {
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

    def _find(self, context: Context) -> Ticket:
        """Return the next ticket after pruning a share of the remaining weights, and note nearly empty layers."""
        with naming_nan("lottery", self._weights, context.step):
            masks = next_masks(self._weights, self._masks, self._rates, self.config.max_layer_sparsity)
        kept = zip(masks.items(), count_kept([*masks.values()]), strict=True)
        counts = {name: (mask.numel(), mask.numel() - count) for (name, mask), count in kept}
        size, gone = (sum(pair) for pair in zip(*counts.values(), strict=True))
        self._result["found"] = size - gone
        # The limit depends on the share pruned in all tensors so far, over all rounds.
        most = most_of_a_tensor(self.config.max_layer_sparsity, gone / size)
        capped = at_limit(most, gone / size, counts) if self.config.scope == "global" else []
        for note in limit_notes(self.key, most, capped, counts):
            context.note(note)
        if self.config.rewind != "weights":
            return Ticket(masks, whole_tensors(context.model), self._at, self.config.rewind, self._rates_held.last)
        if self._ticket is not None:
            return Ticket(masks, self._ticket.weights, self._at)
        # Only the main process has the file. The others write nothing.
        return Ticket(masks, (is_main() and self._folder.kept_weights()) or {}, self._at)

    def _evaluate(self, context: Context) -> str | None:
        """Evaluate the final weights unless already done. Return the reason if that is not possible."""
        if self._history and self._history[-1]["step"] == context.step:
            return None
        try:
            self.evaluated(context, context.services.evaluate())
        except ValueError as error:  # raised by the Trainer, or CompatibilityError
            return str(error)
        return None

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return the claim that everything the ticket prunes is 0."""
        zeros = zeros_of_sharded(self._weights)
        for entry in self._result["tensors"]:
            if entry["name"] in zeros:
                entry["nonzero"] = entry["numel"] - zeros[entry["name"]]
        counted = {entry["name"]: entry["numel"] - entry["nonzero"] for entry in self.report()["tensors"]}
        packed = self._masks.packed().items()
        return {name: Zeros(mask, counted[name], holds=Where.TRAINED) for name, mask in packed}

    def _detach(self) -> None:
        """Release masks and ticket."""
        self._masks.set({})
        self._weights, self._masks.weights = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state: whether step k was reached, the ticket, and the validations. The ticket holds the masks."""
        return {
            "rewound": self._rewound,
            "digest": self._digest,
            "replay": self._replay,
            "history": [{"step": entry["step"], "metrics": dict(entry["metrics"])} for entry in self._history],
            "learning_rates": [list(groups) for groups in self._rates_held.last],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        rule = f"checkpoint must be of a run with the ticket {self.config.ticket}, got one of another round"
        remedy = "give every round its own output folder ({round} in the command is replaced by its name)"
        is_own = self.config.ticket is None or state["digest"] == self._digest
        require(is_own, "lottery", rule, remedy, CheckpointError)
        self._digest, self._rewound = str(state["digest"]), bool(state["rewound"])
        self._replay = state["replay"]
        self._history = [{"step": int(e["step"]), "metrics": dict(e["metrics"])} for e in state["history"]]
        self._rates_held.last = tuple(tuple(groups) for groups in state["learning_rates"])

    def figures(self) -> dict[str, float]:
        """Return ``lottery/left``, the share of the prunable weights that is not pruned."""
        numel = sum(weight.numel() for weight in self._weights.values()) if self._masks else 0
        return {"lottery/left": (numel - sum(self._masks.num_pruned.values())) / numel if numel else 1.0}

    def report(self) -> dict[str, Any]:
        """Return what was trained, how exact the replay was, and how many weights of each tensor are not zero."""
        if not self._result:
            return {"rewind_step": self._at, "replay": self._replay, "left_out": dict(self._targets.left_out)}
        report = {name: value for name, value in self._result.items() if name not in ("format", "history", "tensors")}
        # Counted now, so that weights which `qat` rounds to zero are included.
        counted = {
            name: {"nonzero": int(weight.detach().count_nonzero())}
            for name, weight in self._weights.items()
            if not is_sharded(weight)
        }
        return report | {"tensors": [entry | counted.get(entry["name"], {}) for entry in self._result["tensors"]]}

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        if "kept" not in report:
            return [f"The run has not ended. Its weights are those of step {report['rewind_step']:,}."]
        share = report["kept"] / max(report["numel"], 1)
        what = {"random_reinit": "with new random weights", "random_mask": "with a random mask"}
        how = what.get(report["control"], f"from the weights of step {report['rewind_step']:,}")
        text = f"Trained {share_text(share)} of {amount(report['numel'])} weights, {how}."
        found = report.get("found")
        next_ = f"The next ticket keeps {share_text(found / max(report['numel'], 1))}." if found is not None else ""
        replay = f"The replay was {report['replay']}." if report["replay"] else ""
        return [text, *filter(None, (next_, replay))]
