"""Primary weights: float32 values replace the 16-bit parameters in the optimizer during its step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import all_reduce_, local_part
from shared_core.distributed.sharded_tensors import is_sharded, reshard_
from shared_core.engine.observers.optimizer_modes import has_modes
from shared_core.engine.plan import Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CheckpointError, CompatibilityError, MatchError, TrainingError
from shared_core.primary_weights.config import PrimaryWeightsConfig
from shared_core.primary_weights.copies import (
    Copies,
    CopiesOfShards,
    Draws,
    WideGradients,
    compensated,
    restore_,
    round_compensated_,
)
from shared_core.primary_weights.optimizer_swap import (
    HALF,
    Exchange,
    Part,
    SlicedStep,
    are_same,
    check_match,
    dtype_name,
    is_trained_in_16_bit,
    moments,
    narrow_moments_,
    parameters_of,
    slices,
    trained_in_16_bit,
    updates_each_by_itself,
)
from shared_core.primary_weights.step_order import ClosureOrder, refuse_second_derivatives, refuse_wrappers
from shared_core.printing import amount, share_text, size_text

_OTHER_TENSORS = (
    "a 16-bit parameter changed during the step, though the optimizer must update the tensors in its param_groups; "
    "use an optimizer that reads its param_groups, and change weights after the step"
)


class PrimaryWeights(Technique):
    """Update models with fp16 or bf16 parameters in float32.

    A 16-bit weight w changes only by updates of at least half an ulp: ``2^-12·|w|`` to ``2^-11·|w|`` in fp16,
    ``2^-9·|w|`` to ``2^-8·|w|`` in bf16. Smaller ones are lost. Here each step computes ``P ← optimizer(P, g)`` in
    float32, gradients and moments included, and then ``w ← round(P)``. With ``fp32_copy`` P is kept between
    steps. With ``stochastic_rounding`` P starts from w in each step, and the mean of the rounded value is P.

    Modules, parameters and checkpoints stay as they are. P is in the optimizers only between
    `before_step` and `after_step`, which must surround the optimizer's step. With
    ``stochastic_rounding``, and an optimizer that updates each parameter separately, it is there only within the step,
    for a few parameters at a time.

    Source: Micikevicius et al., 2018, arXiv:1710.03740, section 3.1; the rounding: Gupta et al., 2015,
    arXiv:1502.02551.

    Example:
        >>> from shared_core.engine.recipe import Recipe
        >>> from shared_core.engine.session import Session
        >>> model = nn.ParameterList([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))])
        >>> session = Session(Recipe.from_dict({"primary_weights": {"kind": "fp32_copy"}}))
        >>> session.attach(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> session.begin([optimizer], total_steps=100)
        >>> for _ in range(100):  # bfloat16's neighbor of 1 is 0.00390625 away
        ...     model[0].grad = torch.full((1,), 1e-3)
        ...     session.before_step()
        ...     optimizer.step()
        ...     _ = session.after_step()
        >>> model[0].item()
        0.8984375
    """

    config: PrimaryWeightsConfig

    def __init__(self, config: PrimaryWeightsConfig) -> None:
        super().__init__(config)
        self._model: nn.Module | None = None
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._copies = Copies()
        self._exchanges: list[Exchange] = []
        self._others: list[Tensor] = []
        """Tensors of the optimizers without primaries."""
        self._gradients = WideGradients()
        self._is_in = False
        self._handed: tuple[list[Tensor | None], list[int]] | None = None
        """The gradients and versions of the parameters when their primaries were handed to the optimizer."""
        self._small_updates: dict[str, int] = {}
        self._sliced: SlicedStep | None = None
        self._order = ClosureOrder(())
        self._loads: list[Any] = []
        self._in_slices = False
        """True if the current step is done in slices."""
        self._versions: list[int] = []
        self._lost: dict[Tensor, Tensor] = {}
        """Rounding error of each parameter, with kahan."""
        self._places: tuple[list[Tensor], dict[int, int]] = ([], {})
        """Parameters, and the position of each in the model, by id."""
        self._counts: list[Tensor] = []
        """Updated elements, and those that 16 bit alone would have lost, per slice of a counted step."""
        self._widened = 0
        """Peak bytes of float32 values, on the process with the highest peak."""
        self._shards = CopiesOfShards()
        self._state: Mapping[str, Any] | None = None

    # -- start and end

    def attach(self, context: Context) -> Touched:
        """Check that the model has 16-bit parameters."""
        model = context.model
        context.undo.callback(self._detach)
        self._model = model
        # Lightning's 16-true and bf16-true cast the model only later, so `begin` checks again
        if context.front_end != "lightning":
            check_match(model.parameters())
        chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.dtype in HALF]
        return Touched.parameters(chosen, what="parameters in 16 bit")

    def prepare_optimizers(self, context: Context) -> None:
        """Replace the parameters until `begin`, because torch casts moments to their format on loading.

        Sharded parameters stay, because torch looks up their state by parameter. `begin` restores their moments.
        """
        self._put_back()
        self._optimizers = context.optimizers
        refuse_wrappers(self._optimizers)
        parameters = trained_in_16_bit(self._optimizers)
        # Sharded ones are loaded by `distributed.checkpoint`, and `begin` restores their moments.
        if any(map(is_sharded, parameters)):
            return
        if self.config.kind == "fp32_copy":
            self._put_in()
            return
        # torch reads only their format, so one expanded number is enough
        formats = [nn.Parameter(torch.zeros((), device=p.device).expand(p.shape)) for p in parameters]
        self._exchanges = [Exchange(optimizer, parameters, formats) for optimizer in self._optimizers]
        self._swap_in()

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Create or restore the copies, and let gradients accumulate in float32."""
        saved = None if state is None else self._read(state)
        # A second `begin` (after a resume) must not exchange again.
        self._put_back()
        self._optimizers = context.optimizers
        refuse_wrappers(self._optimizers)
        check_match(parameters_of(self._optimizers))
        if moving := next((type(one).__name__ for one in self._optimizers if has_modes(one)), None):
            rule = f"{moving} changes the weights in its train() and eval(), in 16 bits, which is not supported"
            remedy = "use an optimizer without these modes, or leave primary_weights out"
            raise CompatibilityError("primary_weights", rule, remedy)
        self._order.close()
        self._order = ClosureOrder(self._optimizers)
        self._load_in_float32(context)
        if self.config.kind != "fp32_copy":
            self._slice_steps()
        if self._keeps_16_bit and any(p.dtype != torch.bfloat16 for p in trained_in_16_bit(self._optimizers)):
            raise MatchError(
                "primary_weights",
                "state_dtype bfloat16 needs bfloat16 weights, got float16",
                "use state_dtype float32: small gradients and moments underflow in float16",
            )
        parameters = trained_in_16_bit(self._optimizers)
        names = self._names()
        if saved is not None:
            # Moments before copies, because `_follow` takes over the optimizer's state as it is then.
            self._shards.restore_moments_(self._optimizers, names, saved["moments_of_shards"])
        if self._keeps_16_bit:
            for optimizer in self._optimizers:
                narrow_moments_(optimizer, parameters)
        else:
            self._widen_moments(parameters, saved or {"moments": None, "moments_in_16_bit": ()})
            self._gradients.begin(parameters)
            context.widen_gradients = self._widen_gradients
        # First copy the weights. Values from a checkpoint then replace them in the same tensors.
        if self.config.kind == "fp32_copy":
            self._follow()
        elif self.config.kind == "kahan":
            self._lost = {parameter: self._nothing_lost(parameter) for parameter in parameters}
        copies = {} if saved is None else saved["copies"]
        for parameter, kept in self._kept().items():
            if names[parameter] in copies:
                restore_(kept, parameter, copies[names[parameter]], names[parameter])

    def _load_in_float32(self, context: Context) -> None:
        """Let states that the user loads later, inside `training`, be loaded as before `begin`."""

        def after(*_: Any) -> None:
            self._put_back()
            for optimizer in self._optimizers if self._keeps_16_bit else ():
                narrow_moments_(optimizer, trained_in_16_bit([optimizer]))

        self._stop_loading()
        for optimizer in self._optimizers:
            if hasattr(optimizer, "register_load_state_dict_pre_hook"):
                before = optimizer.register_load_state_dict_pre_hook(lambda *_: self.prepare_optimizers(context))
                self._loads += [before, optimizer.register_load_state_dict_post_hook(after)]

    def _stop_loading(self) -> None:
        for handle in self._loads:
            handle.remove()
        self._loads = []

    def _detach(self) -> None:
        """Restore the optimizers' parameters and their gradients' format. The state stays readable."""
        self._put_back()
        self._close_slices()
        self._order.close()
        self._stop_loading()
        if self._optimizers:
            self._state = self.state_dict()
            self._gradients.end(trained_in_16_bit(self._optimizers))
        self._copies, self._exchanges, self._optimizers, self._lost = Copies(), [], (), {}
        self._places = [], {}

    @torch.no_grad()
    def weights_replaced(self, context: Context) -> None:
        """Create the copies again, because their extra precision belongs to the old weights."""
        for parameter, primary in zip(self._copies.parameters, self._copies.values, strict=True):
            local_part(primary).copy_(local_part(parameter))
        for lost in self._lost.values():
            local_part(lost).zero_()

    # -- the step

    def before_step(self, context: Context) -> None:
        """Put float32 values and gradients into the optimizers, for clipping and the step."""
        self._put_back()
        self._optimizers, sliced = context.optimizers, self._sliced
        self._order.check()
        refuse_second_derivatives(self._optimizers, trained_in_16_bit(self._optimizers))
        # Sliced only if one optimizer trains everything. With two it is unclear which step must round.
        if sliced is not None and self._trained_by() == [sliced.optimizer]:
            parameters = trained_in_16_bit(self._optimizers)
            if not self._keeps_16_bit:
                self._gradients.widen_all(parameters)
            sliced.ready = parameters, lambda: self._step_in_slices(sliced, parameters, context)
            # These reveal an optimizer that writes parameters outside its param_groups.
            self._versions = [parameter._version for parameter in parameters]
            self._in_slices = self._is_in = True
            return
        self._check_format()
        # After each backward, because here the copies follow writes to parameters since the last step.
        self._put_in()
        parameters = self._copies.parameters
        gradients = self._gradients.widen_all(parameters)
        for primary, gradient in zip(self._copies.values, gradients, strict=True):
            # The same tensor, so that clipping in place affects the gradients of both parameter and primary.
            primary.grad = gradient
        self._handed = gradients, [parameter._version for parameter in parameters]

    @torch.no_grad()
    def after_step(self, context: Context, applied: bool) -> None:
        """Write the new values, rounded, into the parameters."""
        if not applied:
            self._put_back()
            self._gradients.restore()
            return
        self._check_step()
        every = self.config.telemetry_every
        # step is already incremented: the sliced path saw step - 1
        if every and (context.step - 1) % every == 0:
            if not self._in_slices:
                self._count_small_updates(self._copies.by_parameter.items())
            self._sum_counts(context.step)
        if self.config.kind == "fp32_copy":
            self._copies.write_()
        elif not self._in_slices:
            draws = self._draws(self._copies.parameters, context.generator)
            for parameter, primary in self._copies.by_parameter.items():
                self._write(Part(parameter), primary, draws)
        self._put_back()

    @property
    def _keeps_16_bit(self) -> bool:
        return self.config.state_dtype == "bfloat16"

    def _slice_steps(self) -> None:
        """Make the optimizer step a few widened parameters at a time, if the result is the same."""
        self._close_slices()
        trained_by = self._trained_by()
        if len(trained_by) == 1 and updates_each_by_itself(trained_by[0]):
            self._sliced = SlicedStep(trained_by[0])
        else:
            self._check_format()

    def _check_format(self) -> None:
        """Raise an error for 16-bit state that would have to be widened all at once."""
        if self._keeps_16_bit:
            names = ", ".join(type(optimizer).__name__ for optimizer in self._trained_by())
            raise CompatibilityError(
                "primary_weights",
                f"state_dtype bfloat16 needs a single optimizer that updates each parameter separately, got {names}",
                "use state_dtype float32, or an optimizer of torch.optim, bitsandbytes or torchao",
            )

    def _close_slices(self) -> None:
        if self._sliced is not None:
            self._sliced.close()
        self._sliced = None

    def _trained_by(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self._optimizers if trained_in_16_bit([optimizer])]

    def _step_in_slices(self, sliced: SlicedStep, parameters: list[Tensor], context: Context) -> None:
        every = self.config.telemetry_every
        draws = self._draws(parameters, context.generator)
        narrow = torch.bfloat16 if self._keeps_16_bit else None
        for parts in slices(sliced.optimizer, parameters):
            # float32 only for this slice, so that the peak is one slice, not one model.
            values = {part: self._widened_part(part) for part in parts}
            self._note_widened(values.values())
            sliced.step_(values, narrow, lambda part, *what: draws.round_(part.parameter, *what))
            if every and context.step % every == 0:
                self._count_small_updates((part.of(part.parameter), wide) for part, wide in values.items())
            for part, wide in values.items():
                self._write(part, wide, draws)

    def _widened_part(self, part: Part) -> Tensor:
        parameter = part.parameter
        weight = part.of(parameter.detach())
        if self.config.kind == "kahan":
            wide = nn.Parameter(compensated(weight, part.of(self._lost_of(parameter))))
        else:
            wide = nn.Parameter(weight.to(torch.float32, copy=True))
        if parameter.grad is not None:
            # A view if gradients are already float32.
            wide.grad = part.of(parameter.grad).float()
        return wide

    def _write(self, part: Part, wide: Tensor, draws: Draws) -> None:
        weight, values = local_part(part.of(part.parameter)), local_part(wide)
        if self.config.kind == "kahan":
            round_compensated_(weight, local_part(part.of(self._lost_of(part.parameter))), values)
        else:
            draws.round_(part.parameter, "weight", weight, values)
        if part.is_last:
            draws.end(part.parameter)

    def _lost_of(self, parameter: Tensor) -> Tensor:
        # Parameters unfrozen or added since `begin` have no rounding error yet.
        if parameter not in self._lost:
            self._lost[parameter] = self._nothing_lost(parameter)
        return self._lost[parameter]

    @staticmethod
    def _nothing_lost(parameter: Tensor) -> Tensor:
        # bf16 also for fp16 weights: half an ulp of a small fp16 weight is subnormal in fp16.
        return torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)

    def _note_widened(self, primaries: Iterable[Tensor]) -> None:
        self._widened = max(self._widened, sum(p.numel() * p.element_size() for p in primaries))

    def _put_in(self) -> None:
        self._follow()
        if self.config.kind != "fp32_copy":
            self._note_widened(self._copies.values)
        if self.config.kind == "kahan":
            for parameter, primary in self._copies.by_parameter.items():
                wide = compensated(local_part(parameter.detach()), local_part(self._lost_of(parameter)))
                local_part(primary.detach()).copy_(wide)
        self._swap_in()

    def _swap_in(self) -> None:
        self._is_in = True
        for exchange in self._exchanges:
            exchange.swap_()

    def _put_back(self) -> None:
        """Undo `_put_in`, if it was called."""
        if not self._is_in:
            return
        for exchange in self._exchanges:
            exchange.swap_()
        if self._handed is not None:
            for parameter, primary in zip(self._copies.parameters, self._copies.values, strict=True):
                if primary.grad is None:
                    parameter.grad = None  # the optimizer's zero_grad only reached the primary
                primary.grad = None
        if self._sliced is not None:
            self._sliced.ready = None
        self._handed, self._is_in, self._in_slices, self._counts = None, False, False, []
        # After the swap, parameters get their reduced gradient tensors back, with clipped values.
        self._gradients.restore()
        # Nothing but the rounded parameters is kept between steps.
        if self.config.kind != "fp32_copy":
            self._copies, self._exchanges = Copies(), []

    def _follow(self) -> None:
        """Create the float32 values of parameters, or let existing copies follow changes by others."""
        # The usual case: the same parameters, so copies only follow.
        if self._are_copied() and self._copies.follow_():
            return
        before = self._copies
        # Known copies keep their extra precision, in any order.
        self._copies = Copies(trained_in_16_bit(self._optimizers), before.by_parameter)
        ours = self._copies.parameters, self._copies.values
        self._exchanges = [Exchange(optimizer, *ours) for optimizer in self._optimizers]
        self._others = [*{*parameters_of(self._optimizers)} - {*self._copies.parameters}]
        if before.parameters:
            # Later writes to the parameters count, as in every step.
            self._copies.follow_()

    def _are_copied(self) -> bool:
        """Return True if there are copies of all parameters that the optimizers now train in 16 bit."""
        return (
            are_same([exchange.optimizer for exchange in self._exchanges], self._optimizers)
            and all(exchange.is_current for exchange in self._exchanges)
            and not any(map(is_trained_in_16_bit, self._others))
        )

    def _draws(self, parameters: list[Tensor], generator: torch.Generator) -> Draws:
        if not are_same(parameters, self._places[0]):
            # Not the optimizer's order, because trainers group parameters differently but must draw the same numbers.
            names = self._names()
            order = {
                name: place for place, (name, _) in enumerate(self._model.named_parameters() if self._model else ())
            }
            by_model = sorted(parameters, key=lambda p: order.get(names[p], len(order)))
            self._places = parameters, {id(parameter): place for place, parameter in enumerate(by_model)}
        return Draws(generator, self._places[1])

    def _check_step(self) -> None:
        problem: str | None
        if not self._is_in:
            problem = (
                "the optimizer stepped without before_step; call session.before_step() when the gradients are complete"
            )
        elif self._in_slices:
            ready = None if self._sliced is None else self._sliced.ready  # still set if the optimizer did not step
            # ready is None once the closure ran, and the optimizer's own writes raised the versions
            is_other = ready is not None and [parameter._version for parameter in ready[0]] != self._versions
            problem = _OTHER_TENSORS if is_other else None
        else:
            problem = self._problem_of_copies()
        if problem is not None:
            self._put_back()
            raise TrainingError("primary_weights", problem)

    def _problem_of_copies(self) -> str | None:
        if self._handed is None:
            return None
        gradients, versions = self._handed
        # The optimizer should have written only the primaries.
        if [parameter._version for parameter in self._copies.parameters] != versions:
            return _OTHER_TENSORS
        now = [parameter.grad for parameter in self._copies.parameters]
        if not are_same(now, gradients) and any(
            one is not None and one is not other for one, other in zip(now, gradients, strict=True)
        ):
            return (
                "after before_step gradients must be changed in place, but parameter.grad is a new tensor "
                "that the optimizer has not seen; use mul_, copy_ and the like"
            )
        return None

    def _widen_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in trained_in_16_bit([optimizer]):
            self._gradients.widen(parameter)

    def _widen_moments(self, parameters: list[Tensor], saved: Mapping[str, Any]) -> None:
        own = saved["moments_in_16_bit"]  # the optimizer itself stores them so
        for optimizer in self._optimizers:
            for parameter in parameters:
                for name, value in moments(optimizer, parameter).items():
                    if value.dtype not in HALF or saved["moments"] == "16 bit" or name in own:
                        continue
                    if saved["moments"] == "float32":
                        raise CheckpointError(
                            "primary_weights",
                            f"the optimizer's saved state must be loaded in float32, got {name} in "
                            f"{dtype_name(value.dtype)}",
                            "call session.prepare_optimizers(optimizers) before optimizer.load_state_dict, and "
                            "resume under FSDP2 what was saved under FSDP2",
                        )
                    # torch's load_state_dict casts float32 moments to the parameter's dtype, which rounds them.
                    optimizer.state[parameter][name] = value.float()

    # -- state and figures

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Gather the copies and moments of sharded parameters for a checkpoint. Every process must call it."""
        if purpose != "checkpoint":
            yield
            return
        try:
            self._gather()
            yield
        finally:
            self._shards = CopiesOfShards()

    def finish(self, context: Context) -> None:
        """Gather copies and moments for a final checkpoint. The parameters already hold the weights."""
        self._gather()

    def _gather(self) -> None:
        if any(map(is_sharded, trained_in_16_bit(self._optimizers))):
            widened = torch.tensor(self._widened, device=local_part(trained_in_16_bit(self._optimizers)[0]).device)
            self._widened = int(all_reduce_(widened, "max"))
        self._shards.gather(self._optimizers, trained_in_16_bit(self._optimizers), self._kept(), self._names())

    def _kept(self) -> dict[Tensor, Tensor]:
        return self._copies.by_parameter if self.config.kind == "fp32_copy" else self._lost

    def state_dict(self) -> dict[str, Any]:
        """Return the copies by parameter name, and the format of the optimizer's moments."""
        if self._state is not None:
            return dict(self._state)
        names = self._names()
        # State is stored under the primaries while they are in the optimizer, else under the parameters.
        formats = {
            (name, value.dtype in HALF)
            for optimizer in self._optimizers
            for parameter in (*self._copies.parameters, *self._copies.values, *trained_in_16_bit([optimizer]))
            for name, value in moments(optimizer, parameter).items()
        }
        is_16_bit = {is_half for _, is_half in formats}
        return {
            "copies": {names[parameter]: primary.detach() for parameter, primary in self._kept().items()}
            | self._shards.copies,
            "moments_of_shards": self._shards.moments,
            "moments": "none" if not is_16_bit else "float32" if False in is_16_bit else "16 bit",
            # some optimizers store only one of their moments in 16 bit
            "moments_in_16_bit": sorted(
                {name for name, is_half in formats if is_half and (name, False) not in formats}
            ),
            "small_updates": dict(self._small_updates),
        }

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore the counts of a saved state; return its copies and moments."""
        try:
            self._small_updates = {key: int(value) for key, value in state["small_updates"].items()}
            of_shards, in_16_bit = dict(state.get("moments_of_shards", {})), list(state.get("moments_in_16_bit", ()))
            moments = {"moments": str(state["moments"]), "moments_in_16_bit": in_16_bit, "moments_of_shards": of_shards}
            return {"copies": dict(state["copies"]), **moments}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                "primary_weights", f"this state was not saved by primary_weights: {error!r}"
            ) from error

    def figures(self) -> dict[str, float]:
        """Return ``primary_weights/small_updates``, the share of updates that 16 bit alone would have lost."""
        share = _share(self._small_updates)
        return {} if share is None else {"primary_weights/small_updates": share}

    def report(self) -> dict[str, Any]:
        """Return what was updated in float32, what was skipped, and what 16 bit alone would have lost."""
        parameters = trained_in_16_bit(self._optimizers)
        others = [] if self._model is None else [*{*self._model.parameters()} - {*parameters}]
        return {
            "kind": self.config.kind,
            "parameters": len(parameters),
            "elements": sum(parameter.numel() for parameter in parameters),
            "format": ", ".join(sorted({dtype_name(parameter.dtype) for parameter in parameters})),
            "copy_bytes": sum(kept.numel() * kept.element_size() for kept in self._kept().values()),
            "widened_bytes_at_once": self._widened,
            "left_alone": dict(Counter(dtype_name(p.dtype) + ("" if p.requires_grad else ", frozen") for p in others)),
            "gradients": self._format_of_gradients(),
            "small_updates": _share(self._small_updates),
            "small_updates_step": self._small_updates.get("step"),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        weights = f"{amount(report['elements'])} {report['format']} weights".replace("  ", " ")
        how = {"fp32_copy": "in float32 copies", "stochastic_rounding": "with stochastic rounding"}
        copies = report["copy_bytes"]
        size = f", which take {size_text(copies)}" if copies else ""
        small = report["small_updates"]
        return [
            f"Updated {weights} {how.get(report['kind'], report['kind'])}{size}.",
            *(
                []
                if small is None
                else [
                    f"At step {report['small_updates_step']:,}, {share_text(small)} of the updates were too small for "
                    "16 bits."
                ]
            ),
        ]

    def _count_small_updates(self, primaries: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Count the elements with a gradient, and those whose nearest 16-bit value stays the same."""
        for parameter, wide in primaries:
            if wide.grad is not None:
                has_gradient = local_part(wide.grad).to_dense() != 0
                # Before the parameter is written: does the nearest 16-bit value of the new primary differ from it?
                same = local_part(wide).to(parameter.dtype) == local_part(parameter)
                self._counts.append(torch.stack([has_gradient.count_nonzero(), (has_gradient & same).count_nonzero()]))

    def _format_of_gradients(self) -> str:
        if self._keeps_16_bit:
            return "accumulated in 16 bit"
        return "reduced in 16 bit" if self._gradients.reduced_in_16_bit else "accumulated in float32"

    def _sum_counts(self, step: int) -> None:
        parameters = self._copies.parameters or trained_in_16_bit(self._optimizers)
        found = [count.to(parameters[0].device) for count in self._counts]
        counted = torch.stack(found).sum(0) if found else torch.zeros(2, dtype=torch.long, device=parameters[0].device)
        # Each process counts its shards. Whole parameters are counted equally on every process.
        if any(map(is_sharded, parameters)):
            all_reduce_(counted, "sum")
        updated, small = counted.tolist()
        self._small_updates = {"step": step, "updated": updated, "small": small}
        self._counts = []

    def _names(self) -> dict[Tensor, str]:
        # for example, weights of a loss are in an optimizer but not in the model
        places = [*trained_in_16_bit(self._optimizers), *self._copies.parameters]
        names = {parameter: f"optimizer parameter {place}" for place, parameter in enumerate(dict.fromkeys(places))}
        if self._model is not None:
            # With FSDP2, parameters gathered for a forward are different tensors from the optimizer's.
            reshard_(self._model)
            names.update({parameter: name for name, parameter in self._model.named_parameters()})
        return names


def _share(counted: Mapping[str, int]) -> float | None:
    return counted["small"] / max(counted["updated"], 1) if counted else None
