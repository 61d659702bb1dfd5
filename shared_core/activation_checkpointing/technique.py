"""Activation checkpointing as a technique."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shared_core.activation_checkpointing.config import CheckpointingConfig
from shared_core.activation_checkpointing.policies import LazyBudget, apply_policy, chosen_blocks
from shared_core.activation_checkpointing.segments import Handle, Tally, apply_segments
from shared_core.engine.checks.model_guards import refuse_scripted
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import TrainingError
from shared_core.modules.calls import RunHook
from shared_core.printing import counted, listed, size_text


class ActivationCheckpointing(Technique):
    """Recomputes activations in backward instead of keeping them. Gradients stay bit-equal.

    Example:
        >>> from shared_core import Recipe, Session
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        >>> session = Session(Recipe.from_dict({"checkpointing": {"policy": "every_k", "k": 2}}))
        >>> session.attach(net)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> session.begin([optimizer], total_steps=1)
        >>> session.loss(net(torch.ones(2, 4)).sum()).backward()
        >>> session.before_step()
        >>> session.techniques["checkpointing"].report()["recomputations"]
        2
    """

    config: CheckpointingConfig

    def __init__(self, config: CheckpointingConfig) -> None:
        super().__init__(config)
        self.handle: Handle | None = None
        """The wrapped blocks; None until a budget is planned, or if nothing needs recomputing."""
        self._budget: LazyBudget | None = None
        self._model: nn.Module | None = None
        self._hook: RemovableHandle | None = None
        self._steps = self._num_said = 0
        self._checked = self._was_recomputed = False
        self._earlier: Mapping[str, Any] = {}
        """Counts of the run that this run resumes."""

    def attach(self, context: Context) -> Touched:
        """Wrap the blocks. A budget first profiles the first micro-batches of training."""
        model = context.model
        context.undo.callback(self._detach)
        config = self.config
        for name in chosen_blocks(model, config.include):
            refuse_scripted(model.get_submodule(name), f"checkpointing: {name}")
        if config.has_budget:
            self._model = model
            self._budget = LazyBudget(model, config.policy, chosen_blocks(model, config.include), self._wrap)
            # For loops that do not use `session.forward`, hook the model itself.
            self._hook = model.register_forward_pre_hook(RunHook(lambda *_: self._look()))
        else:
            self.handle = apply_policy(model, config.policy, k=config.k, include=config.include)
        names = self.handle.names if self.handle else chosen_blocks(model, self.config.include)
        return Touched.modules({name: model.get_submodule(name) for name in names}, what="blocks")

    def plan(self, context: Context) -> Plan:
        """Return a plan that guards the blocks, whose forwards are wrapped."""
        return Plan(guards=self.handle.blocks if self.handle else {}, acts_on_gradients=False)

    def _wrap(self, segments: Sequence[Sequence[str]]) -> None:
        if any(segments) and self._model is not None:
            self.handle = apply_segments(self._model, segments)

    @contextlib.contextmanager
    def forward(self, context: Context) -> Iterator[None]:
        """Tell the budget that a micro-batch starts."""
        self._unhook()
        self._look()
        yield

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self) -> None:
        if self._budget is not None and self._model is not None and self._model.training and torch.is_grad_enabled():
            self._budget.before_forward()

    def before_step(self, context: Context) -> None:
        """Raise if backward recomputed nothing, since no memory would be saved."""
        if not context.has_gradients:  # every micro-batch was skipped; check in the next step
            if self._budget is not None:
                self._budget.cancel()
            return
        if self._budget is not None and not self._budget.is_done:
            self._budget.after_backward()
            if self._budget.is_done:
                self._unhook()
            if self._budget.remark is not None:
                context.services.say(f"efftrain: checkpointing: {self._budget.remark}")
            if self._budget.plan is None or self.handle is None or self.handle.tally.recomputations == 0:
                return  # still planning, or just wrapped
        self._steps += 1
        # With several optimizers, the blocks may belong to another one's loss.
        if not self._checked and len(context.optimizers) < 2 and self._is_reached:
            self._check()
            self._checked = True
        notes = self.handle.tally.notes if self.handle is not None else []
        for text in notes[self._num_said :]:
            context.services.say(f"efftrain: checkpointing: {text}")
        self._num_said = len(notes)

    @property
    def _is_reached(self) -> bool:
        """True if training has reached a wrapped block; experts of a mixture may get no token for many steps."""
        return self.handle is None or self.handle.tally.reached

    @property
    def _has_recomputed(self) -> bool:
        """True if backward recomputed a block in this process."""
        return self.handle is not None and (self.handle.tally.recomputations > 0 or self.handle.tally.compiled)

    def _check(self) -> None:
        if self._budget is not None and self._budget.plan is not None and not self._budget.plan.segments:
            return  # everything fits without recomputing
        if not self._has_recomputed:
            raise TrainingError(
                "checkpointing",
                f"policy {self.config.policy} must recompute blocks in backward, but none was recomputed: the blocks "
                "did not run in train mode, or need no gradients",
                "name other blocks in include, or leave checkpointing out",
            )

    def finish(self, context: Context) -> None:
        """Unwrap the blocks. The weights need no conversion."""
        if self._steps and (self._is_reached or not self._was_recomputed):
            self._check()
        elif self._budget is not None and self._budget.plan is None:
            context.services.say("efftrain: checkpointing: the run ended before a budget could be planned")
        self._detach()

    def _detach(self) -> None:
        """Restore the blocks' own forward."""
        if self._budget is not None:
            self._budget.cancel()
        self._unhook()
        if self.handle is not None:
            self.handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return whether blocks were recomputed, and a budget's plan, which a resumed run uses from its first step."""
        budget = {} if self._budget is None else {"budget": self._budget.state_dict()}
        return budget | {"recomputed": self._was_recomputed or self._has_recomputed, "tallies": self._counts()}

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Restore the state returned by `state_dict`. Recomputations since an earlier checkpoint stay counted."""
        if state is None:
            return
        self._was_recomputed = bool(state.get("recomputed"))
        if self._budget is not None:
            self._budget.load_state_dict(state.get("budget", {}))
        counts = state.get("tallies", {})
        if not self._steps and counts.get("modules") == self._counts()["modules"]:
            self._earlier = dict(counts)

    def _counts(self) -> dict[str, Any]:
        """Return the counts, including those of the run that this one resumes."""
        earlier, tally = self._earlier, Tally() if self.handle is None else self.handle.tally
        return {
            "modules": [] if self.handle is None else self.handle.names,
            "steps": self._steps + earlier.get("steps", 0),
            "recomputations": tally.recomputations + earlier.get("recomputations", 0),
            "blocks": dict(tally.blocks + Counter(earlier.get("blocks", {}))),
            "saved_bytes": earlier["saved_bytes"] if earlier.get("recomputations") else tally.saved_bytes,
        }

    def report(self) -> dict[str, Any]:
        """Return the wrapped blocks, how often they were recomputed, and the bytes that one backward found freed."""
        budget = {} if self._budget is None else self._budget.report()
        if self.handle is None:
            return {"policy": self.config.policy, **budget}
        tally, counts = self.handle.tally, self._counts()
        uncounted = [name for name in self.handle.names if name not in counts["blocks"]]
        return {
            "policy": self.config.policy,
            "blocks": len(self.handle.names),
            "segments": len(self.handle.segments),
            "modules": self.handle.names,
            "recomputations": counts["recomputations"],
            "recomputations_per_step": counts["recomputations"] / max(counts["steps"], 1),
            "modules_recomputed": sum(counts["blocks"].values()),
            "uncounted" if tally.compiled else "never_recomputed": uncounted,  # compiled graphs are not counted
            "saved_bytes": counts["saved_bytes"],
            **budget,
            **({"compiled": tally.compiled} if tally.compiled or tally.uncompiled else {}),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report as plain sentences, the result first. The report may come from a file."""
        lines = []
        if "recomputations" in report:
            blocks = counted(report["blocks"], "block")
            times = counted(round(report["recomputations_per_step"]), "recomputation")
            saved = report["saved_bytes"]
            kept = f", which freed {size_text(saved)} of activations" if saved > 0 else ""
            lines.append(f"Recomputed {blocks} in the backward pass, {times} a step{kept}.")
        if report.get("planned"):
            peak, whole = report["predicted_peak_bytes"], report["peak_bytes_without"]
            lines.append(f"The plan needs at most {size_text(peak)} of activations, without it {size_text(whole)}.")
        if missed := report.get("never_recomputed"):
            lines.append(f"Never recomputed: {listed(missed, 3)}.")
        return lines or ["Nothing was recomputed yet."]
