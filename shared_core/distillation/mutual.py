"""Deep mutual learning: students that train together, each also towards what the others say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shared_core.distillation.batch import check_classes, find_logits
from shared_core.distillation.comparison import Compared, Comparison, StudentBatch, load_named
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.fused_sum import divergence_sum
from shared_core.distillation.heads import check_heads
from shared_core.distillation.peers import Peers
from shared_core.distillation.redraw import redrawn
from shared_core.distillation.teachers import check_separate
from shared_core.errors import ConfigError
from shared_core.ranks import world_size
from shared_core.technique import Context
from shared_core.wrappers import copied


class MutualComparison(Comparison):
    """Compares every student with every other in one micro-batch: ``mean over j != i of D(p_j || p_i)``.

    All of them are updated in the same optimizer step, from outputs of the same weights (Zhang et al., 2017,
    arXiv:1706.00384, whose Algorithm 1 updates them in turn, each from the others' newest outputs).

    Args:
        config: The options.
        model: The user's.
        peers: The other students.
        context: Its services compute the peers' task losses.
    """

    def __init__(self, config: DistillConfig, model: nn.Module, peers: Peers, context: Context) -> None:
        sizes = [sum(each.numel() for each in module.parameters()) for module in peers.modules]
        told = {"teacher": f"mutual learning of {len(sizes) + 1} students", "peer_parameters": sizes}
        super().__init__(config, peers, told)
        self._model, self._peers, self._context = model, peers, context
        self._latest: list[tuple[Tensor, Tensor]] = []

    def begin(self, context: Context) -> None:
        """Let the optimizers train the peers."""
        self._peers.begin(context)

    def compare(self, batch: StudentBatch) -> Compared:
        """Return how far the student is from its peers, and keep how far each of them is from the others."""
        config = self.config
        logits = find_logits(batch.forward.output, config.logits, "student")
        mask = batch.counted(logits, of_classes=config.of_classes)
        studied = self._peers.study(self._model, batch.forward, self._context)
        everyone = [logits, *(find_logits(output, config.logits, "peer") for _, output in studied)]
        for other in everyone[1:]:
            check_classes(logits, other, of_classes=config.of_classes)
        options: dict[str, Any] = {"beta": config.beta} if config.divergence == "jsd" else {}
        options |= {"temperature": batch.temperature, "mask": mask, "scale_by_temperature": config.scale_by_temperature}
        totals = []
        for mine in everyone:
            others = [other.detach() for other in everyone if other is not mine]
            sums = [divergence_sum(config.divergence, mine, other, **options) for other in others]
            totals.append(torch.stack([total for total, _ in sums]).mean())
            count = sums[0][1]
        self._latest = list(zip((task for task, _ in studied), totals[1:], strict=True))
        return Compared(totals[0], count, mask)

    def join(self, mixed: Tensor, task_loss: Tensor, alpha: float, count: Tensor, context: Context) -> Tensor:
        """Return the student's loss unchanged in value, with the gradients of all peers' losses beside its own."""
        losses = [mix(task, context.normalise(total, count), alpha) for task, total in self._latest]
        # what a loss of 1 is in this micro-batch: a trainer may divide by the positions of its whole window
        share = context.normalise(count.to(torch.float32), count)
        self._peers.note_losses([task_loss, *(task for task, _ in self._latest)], share)
        self._latest = []
        together = torch.stack([loss.to(mixed.device) for loss in losses]).sum()
        if world_size() > 1:
            # DDP knows nothing of the peers. Averaged at the end of each backward, before a scaler looks for overflow,
            # so that all processes skip the same steps.
            together.register_hook(self._after_this_backward)  # type: ignore[no-untyped-call]
        return mixed + (together - together.detach())

    def _after_this_backward(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._peers.average_gradients)  # type: ignore[attr-defined]

    def metrics(self) -> dict[str, float]:
        """Return the peers' mean task loss."""
        return {"distill/peer_task_loss": float(self._peers.losses[1:].mean())}

    def detach(self) -> None:
        """Take the peers out of the optimizers, and tell which student was best."""
        names = ["student", *(f"peer {number}" for number in range(1, len(self._peers.losses)))]
        losses = dict(zip(names, self._peers.losses.tolist(), strict=True))
        self.told |= {"task_losses": losses, "best": min(losses, key=lambda name: losses[name])}
        self._peers.detach()


def mix(task_loss: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """Return ``alpha * task + (1 - alpha) * soft``; a term of weight 0 is not read, as 0 * inf would be NaN.

    Example:
        >>> task, soft = torch.tensor(1.0), torch.tensor(torch.inf)
        >>> mix(task, task + 1, 0.5).item(), mix(task, soft, 1).item()
        (1.5, 1.0)
    """
    if alpha == 1:
        return task_loss
    soft = soft.to(task_loss.device)
    return soft if alpha == 0 else alpha * task_loss + (1 - alpha) * soft


def make_peers(config: DistillConfig, model: nn.Module, student: nn.Module, context: Context) -> Peers:
    """Return the other students of a model that is untouched still.

    Args:
        config: The options; `peers` is how many students there are, or names or modules of the others.
        model: Where a peer is drawn, the copied model; where one is given, it takes the student's place in a copy.
        student: The model, or the submodule of it that `config` names.
        context: Its generator gives the seeds, its services load peers by name.

    Raises:
        ConfigError: If a peer cannot learn with this student, or is another student over again.
        CompatibilityError: If it shares weights with the model.
        MatchError: If a weight cannot be drawn anew.
    """
    modules: list[nn.Module] = []
    for given in config.given_peers:
        module = load_named(given, student, context)
        check_separate(model, module)
        check_heads(student, module, config.divergence)
        modules.append(module if student is model else copied(model, {id(student): module}))
    for _ in range(config.drawn_peers):
        modules.append(redrawn(model, int(torch.randint(2**31, (), generator=context.generator))))
    for number, module in enumerate(modules, 1):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"distill: peers must have weights that train, got none in peer {number}")
        if any(_same(module, other) for other in [model, *modules[: number - 1]]):
            raise ConfigError(
                f"distill: peers must differ from the student and each other, but peer {number} has the same weights "
                "as another student; draw its weights from another seed"
            )
    return Peers(modules, config.student or "")


def _same(first: nn.Module, second: nn.Module) -> bool:
    if first is second:
        return True
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    return ours.keys() == theirs.keys() and all(
        tensor.shape == theirs[name].shape and torch.equal(tensor, theirs[name].to(tensor.device))
        for name, tensor in ours.items()
    )
