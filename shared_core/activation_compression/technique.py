"""Compressed and offloaded activations: store the tensors that autograd saves for backward in fewer bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from shared_core.activation_compression.config import NO_USE, ActivationsConfig
from shared_core.activation_compression.saved_tensors import Counts, CudaLane, HeldMemory, HostMover, Ledger, Packing
from shared_core.distributed.collectives import rank
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.printing import counted, share_text, size_text


class ActivationCompression(Technique):
    """Packs the tensors that a training forward saves for backward, with autograd's own hooks.

    The model does not change. With ``pack: exact`` gradients stay bit-equal.

    Example:
        >>> from torch import nn
        >>> from shared_core.engine.recipe import Recipe
        >>> from shared_core.engine.session import Session
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> session = Session(Recipe.from_dict({"activations": {"pack": "exact", "min_size": 64}}))
        >>> session.attach(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session.begin([optimizer], total_steps=1)
        >>> with session.forward():
        ...     loss = model(torch.randn(32, 8)).square().mean()
        >>> loss.backward()
        >>> session.before_step()
        >>> session.techniques["activations"].report()["kinds"]["bitmap"]["tensors"]
        1
    """

    config: ActivationsConfig

    def __init__(self, config: ActivationsConfig) -> None:
        super().__init__(config)
        self.counts = Counts()
        self._mover: HostMover | None = None
        self._held: HeldMemory | None = None
        self._step, self._micro_batch = -1, 0

    def attach(self, context: Context) -> Touched:
        """Raise if offload is on and there is no GPU."""
        if self.config.offload:
            _check_offload(torch.cuda.is_available(), "a machine without one")
        return Touched()

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Create the stream for copies to the host."""
        if state is not None:
            self._step, self._micro_batch = int(state.get("step", -1)), int(state.get("micro_batch", 0))
            if "counts" in state:
                self.counts.load_state_dict(state["counts"])
        self._held = HeldMemory(context.model)
        if self.config.offload:
            # One stream per device; models on several devices would need several.
            device = next(context.model.parameters()).device
            _check_offload(device.type == "cuda", f"a model on {device.type}")
            self._mover = HostMover(CudaLane(device))

    def plan(self, context: Context) -> Plan:
        """Return a plan for which `before_step` need not see gradients."""
        return Plan(acts_on_gradients=False)

    def forward(self, context: Context) -> Packing:
        """Return a context that packs the tensors saved by the forward inside."""
        # Counted within a step, so that accumulated micro-batches round with different random numbers.
        self._micro_batch = self._micro_batch + 1 if context.step == self._step else 1
        self._step = context.step
        generators: dict[torch.device, torch.Generator] = {}

        def generator_on(device: torch.device) -> torch.Generator:
            # Separate for each micro-batch and process, so a resumed run draws the same numbers.
            if device not in generators:
                text = f"{context.generator.initial_seed()}/{context.step}/{self._micro_batch}/{rank()}"
                seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
                generators[device] = torch.Generator(device).manual_seed(seed)
            return generators[device]

        if self._held is not None:
            self._held.start()
        if self._mover is not None:
            self._mover.start()
        return Packing(Ledger(self.config, self.counts, held=self._held, mover=self._mover, generator=generator_on))

    def before_step(self, context: Context) -> None:
        """Check once that tensors were packed, and rounded if requested."""
        if not self.counts.forwards and not context.has_gradients:
            return  # every micro-batch was skipped; check in the next step
        pack, counts, left = self.config.pack, self.counts, f"not packed: {self.counts.left_alone()}"
        rule, remedy = f"the first step must pack a tensor with pack={pack}, but packed none", ""
        if not counts.forwards:
            rule, remedy = (
                "forward and loss must run inside session.forward(), got a step without it",
                "write `with session.forward():` around them",
            )
        # Checked at the end of kinds, since "bitmap+int8" is also rounded.
        elif self.config.rounds and not any(kind.endswith(pack) for kind in counts.kinds):
            rule = f"the first step must round a tensor with pack={pack}, but rounded none"
            remedy = (
                f"{left}; 16-bit values are not rounded to 16 bits, regions under activation checkpointing keep only "
                "their inputs, and in a compiled model activations look like statistics; use pack exact, or lower "
                "min_size"
            )
        elif not counts.kinds:
            remedy = (
                f"{left}; lower min_size, use pack bf16 or int8, or recompute fewer blocks: under checkpointing they "
                "keep only inputs"
            )
        if remedy:
            raise TrainingError("activations", rule, remedy)
        # Checking once is enough; `report` continues to count.
        context.drop(self.before_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position within the step, and the counts."""
        return {"step": self._step, "micro_batch": self._micro_batch, "counts": self.counts.state_dict()}

    def figures(self) -> dict[str, float]:
        """Return the share of the activations' bytes saved so far."""
        return {"activations/saved": self.counts.share_saved}

    def report(self) -> dict[str, Any]:
        """Return the bytes of a forward before and after, the share saved, and tensors by kind."""
        return self.counts.report()

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report as plain sentences, the result first. The report may come from a file."""
        if not report["forwards"]:
            return ["Compressed nothing: no forward pass was seen in training."]
        sizes = f"{size_text(report['bytes_after'])} instead of {size_text(report['bytes_before'])}"
        shared = report["saved_again"]
        return [
            f"Saved activations took {sizes} a forward pass ({share_text(report['share_saved'])} less), "
            f"over {counted(report['forwards'], 'forward pass', 'forward passes')}.",
            *([f"{counted(shared, 'tensor')} had been saved before and were shared."] if shared else []),
        ]


def _check_offload(is_possible: bool, found: str) -> None:
    if not is_possible:
        rule = f"offload must run on a CUDA device, got {found}, where {NO_USE}"
        raise CompatibilityError("activations", rule, "leave offload out, and pack them (--activations_pack exact)")
