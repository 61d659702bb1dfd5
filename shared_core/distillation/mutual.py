"""Deep mutual learning: students train together, each also toward the predictions of the others.

The other students are copies of the user's model with re-initialized weights. They live outside the model, and the
user's own optimizer trains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.comparison import (
    Compared,
    Comparison,
    StudentBatch,
    difference,
    load_named,
    mix,
    share_of,
)
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.forward_capture import Forward, ForwardHook
from shared_core.distillation.outputs import EMBEDDINGS, check_heads, check_outputs, find_outputs, is_of_classes
from shared_core.distillation.teachers import Teachers, check_separate, copied, shapes_of, tensors_of
from shared_core.distributed.collectives import all_reduce_, broadcast_, world_size
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, ConfigError, MatchError, TrainingError
from shared_core.files.atomic import atomic_write
from shared_core.modules.calls import RunHook, cache_configs, remove_hooks, without_cache

PEER_FILE = "eff_peer_{}.safetensors"
"""File name of a peer's weights in the run's folder; peers count from 1."""
_LEAST_SHARE = 0.05


class Peers(Teachers):
    """The other students: models like the user's, each with its own student submodule.

    Their parameters join the parameter groups of the user's optimizers, so they share the student's learning rates,
    decay, loss scale and skipped steps. The optimizers' saved state leaves them out; `state_dict` holds them instead.
    """

    def __init__(self, modules: Sequence[nn.Module], student: str) -> None:
        super().__init__([])
        self.modules = list(modules)
        self.students = [module.get_submodule(student) for module in modules]
        self.losses = torch.zeros(len(modules) + 1)
        """Task loss of the student and each peer: a mean over the first micro-batches, then a moving average."""
        self._micro_batches = 0
        self._hooks = [ForwardHook() for _ in modules]
        self._handles: list[RemovableHandle] = []
        self._optimizer_of: dict[nn.Parameter, Optimizer] = {}
        for hook, module in zip(self._hooks, self.students, strict=True):
            hook.active = True
            self._handles.append(module.register_forward_hook(RunHook(hook), with_kwargs=True))

    def join_optimizers(self, context: Context) -> None:
        """Add the peers to the optimizers, after their own saved state was loaded. A second call does nothing."""
        # The saved optimizer state holds only the student's parameters, in their numbering.
        if not self._optimizer_of:
            for module in self.modules:
                self._join(module, context)
            for optimizer in context.optimizers:
                self._handles.append(optimizer.register_state_dict_post_hook(self._leave_out))
                self._handles.append(optimizer.register_load_state_dict_pre_hook(self._add_present))
        for module in self.modules:
            # DDP does not cover peers, so make them equal on all processes here.
            for tensor in tensors_of(module).values():
                broadcast_(tensor)

    def _join(self, module: nn.Module, context: Context) -> None:
        groups = [(optimizer, group) for optimizer in context.optimizers for group in optimizer.param_groups]
        place = {id(mine): index for index, (_, group) in enumerate(groups) for mine in group["params"]}
        students = dict(context.model.named_parameters())
        trained = [mine for mine in students.values() if id(mine) in place]
        # The group with most of the student's vectors (biases, norms), and the one with most of its matrices.
        counts = [Counter(place[id(mine)] for mine in trained if (mine.ndim > 1) == matrix) for matrix in (False, True)]
        joined: list[tuple[int, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            # The group of the student's weight of this name, or else the group with most similar weights.
            mostly = (counts[parameter.ndim > 1] or sum(counts, Counter())).most_common(1)
            index = place.get(id(students[name])) if name in students else mostly[0][0] if mostly else None
            if parameter.requires_grad and index is not None:
                joined.append((index, parameter))
        if not joined:
            rule = "peers must be trained by the student's optimizer, but it holds none of the student's weights"
            raise TrainingError("distill", rule, "pass the optimizer of the attached model to begin")
        for index, parameter in joined:
            optimizer, group = groups[index]
            group["params"].append(parameter)
            self._optimizer_of[parameter] = optimizer

    def _leave_out(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        # torch numbers parameters across all groups. Without the peers the numbers must be consecutive again.
        numbers: dict[int, int] = {}
        groups = []
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            pairs = zip(group["params"], saved["params"], strict=True)
            kept = [number for parameter, number in pairs if parameter not in self._optimizer_of]
            numbers.update({number: len(numbers) + index for index, number in enumerate(kept)})
            groups.append({**saved, "params": [numbers[number] for number in kept]})
        of_student = {numbers[number]: values for number, values in state["state"].items() if number in numbers}
        return {**state, "state": of_student, "param_groups": groups}

    def _add_present(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state with the peers' current optimizer state, which `_leave_out` has removed."""
        number = 1 + max((number for saved in state["param_groups"] for number in saved["params"]), default=-1)
        groups, states = [*state["param_groups"]], dict(state["state"])
        for index, (group, saved) in enumerate(
            zip(optimizer.param_groups, groups, strict=False)
        ):  # torch checks lengths
            peers = [parameter for parameter in group["params"] if parameter in self._optimizer_of]
            numbers = range(number, number := number + len(peers))
            groups[index] = {**saved, "params": [*saved["params"], *numbers]}
            states |= {n: optimizer.state[p] for n, p in zip(numbers, peers, strict=True) if p in optimizer.state}
        return {**state, "state": states, "param_groups": groups}

    def detach(self) -> None:
        """Remove the peers from the optimizers."""
        remove_hooks(self._handles)
        self.drop_gradients()
        for optimizer in {*self._optimizer_of.values()}:
            for group in optimizer.param_groups:
                # In place, because schedulers and wrappers hold the same list.
                group["params"][:] = [mine for mine in group["params"] if mine not in self._optimizer_of]
        for parameter, optimizer in self._optimizer_of.items():
            optimizer.state.pop(parameter, None)
        self._handles, self._optimizer_of = [], {}
        for module in self.modules:
            module.eval()

    def study(self, model: nn.Module, forward: Forward, context: Context) -> list[tuple[Tensor, Any]]:
        """Return each peer's task loss for this micro-batch, and its student's output."""
        # By name, since a peer of another class may have other modules; these are set to train mode.
        modes = {name: module.training for name, module in model.named_modules()}
        found = []
        for module, student, hook in zip(self.modules, self.students, self._hooks, strict=True):
            for name, part in module.named_modules():
                part.training = modes.get(name, True)
            for buffer in module.buffers():
                broadcast_(buffer)  # like DDP before each forward
            with without_cache(cache_configs(module)):
                loss = context.services.task_loss(module, partial(student, *forward.args, **forward.kwargs))
            latest = hook.take()
            if latest is None:
                rule = "a peer's forward must run when its task loss is computed, but did not"
                raise TrainingError("distill", rule, "in the loss, call the model passed as argument, not a stored one")
            found.append((loss, latest.output))
        return found

    def note_losses(self, losses: Sequence[Tensor], share: Tensor) -> None:
        """Update the averages with the task losses of one micro-batch on all processes, as scaled by the trainer."""
        self._micro_batches += 1
        # Dividing by `share`, the micro-batch's weight in its window, makes windows of any size comparable.
        now = torch.stack([loss.detach().to(share.device, torch.float32) for loss in losses]) / share
        # A loss that is not finite (its step is skipped) would stay in the average forever.
        now = torch.where((share > 0) & now.isfinite(), now, self.losses.to(now.device))
        all_reduce_(now, "sum").div_(world_size())
        # A plain mean of the first 20, then an average with decay 0.95, avoids a bias toward the initial zeros.
        self.losses = self.losses.to(now.device).lerp(now, max(_LEAST_SHARE, 1 / self._micro_batches))

    def average_gradients(self) -> None:
        """Average all gradients over the processes, as DDP does for the student."""
        peers = [*self._optimizer_of]
        # All ranks must first agree which gradients exist: all_reduce in different orders hangs.
        reached = torch.tensor([each.grad is not None for each in peers], dtype=torch.uint8, device=peers[0].device)
        for parameter, anywhere in zip(peers, all_reduce_(reached, "max").tolist(), strict=True):
            if anywhere and parameter.grad is None:  # an expert with tokens only on another process
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in peers if parameter.grad is not None]
        # One collective per dtype, because many small ones cost more than the copies.
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = all_reduce_(torch.cat([gradient.flatten() for gradient in alike]), "sum").div_(world_size())
            for gradient, mean in zip(alike, torch.split(flat, [each.numel() for each in alike]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def one_by_one(self, clip: Callable[[], Any]) -> None:
        """Call `clip` once per student while the others have no gradients, so that each norm covers one model."""
        # `clip` is the trainer's and computes the norm over all parameters in the optimizer.
        groups = [group for optimizer in {*self._optimizer_of.values()} for group in optimizer.param_groups]
        everyone = [parameter for group in groups for parameter in group["params"]]
        gradients = {parameter: parameter.grad for parameter in everyone}
        members = [[each for each in module.parameters() if each in gradients] for module in self.modules]
        members.append([parameter for parameter in everyone if parameter not in self._optimizer_of])
        try:
            for parameter in everyone:
                parameter.grad = None
            for mine in members:
                for parameter in mine:
                    parameter.grad = gradients[parameter]
                clip()
                for parameter in mine:
                    parameter.grad = None
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def after_step(self, student: nn.Module) -> None:
        """Clear the peers' gradients after an optimizer step."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Clear the peers' gradients, since the trainer only clears its own model's."""
        for parameter in self._optimizer_of:
            parameter.grad = None

    def write(self, folder: Path) -> None:
        """Write each peer's state dict as `PEER_FILE`, under the plain model's names."""
        for number, module in enumerate(self.modules, 1):
            # Copied, because safetensors rejects two names for one storage.
            tensors = {name: value.to("cpu", copy=True).contiguous() for name, value in module.state_dict().items()}
            with atomic_write(folder / PEER_FILE.format(number)) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})

    def state_dict(self) -> dict[str, Any]:
        """Return each peer's weights, buffers and optimizer state, and gradients within an accumulation window."""
        return {
            "losses": self.losses.clone(),
            "micro_batches": self._micro_batches,
            "peers": [self._state_of(module) for module in self.modules],
        }

    def _state_of(self, module: nn.Module) -> dict[str, Any]:
        trained = {name: each for name, each in module.named_parameters() if each in self._optimizer_of}
        return {
            "weights": {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()},
            "optimizer": {
                name: {
                    key: value.detach().clone() if isinstance(value, Tensor) else value
                    for key, value in self._optimizer_of[each].state[each].items()
                }
                for name, each in trained.items()
                if each in self._optimizer_of[each].state
            },
            "gradients": {name: each.grad.clone() for name, each in trained.items() if each.grad is not None},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Restore saved peers, after `begin`."""
        ours = [tensors_of(module) for module in self.modules]
        saved = [each["weights"] for each in state.get("peers", ())]
        # Compare all shapes by name before anything is written.
        if [shapes_of(each) for each in saved] != [shapes_of(each) for each in ours]:
            rule = f"saved peers must match the {len(ours)} of this run, got {len(saved)} or other shapes"
            raise CheckpointError("distill", rule, "resume with the peers of the run that wrote the checkpoint")
        self.losses, self._micro_batches = state["losses"].clone(), int(state["micro_batches"])
        groups = [group for optimizer in {*self._optimizer_of.values()} for group in optimizer.param_groups]
        # torch keeps step counts on the CPU, except for kernels that read them
        on_device = {p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]}
        for module, tensors, each in zip(self.modules, ours, state["peers"], strict=True):
            for name, tensor in tensors.items():
                tensor.copy_(each["weights"][name])
            for name, parameter in module.named_parameters():
                if parameter not in self._optimizer_of:
                    continue
                states = self._optimizer_of[parameter].state
                states.pop(parameter, None)
                if name in each["optimizer"]:  # plain SGD has no state; Adam none before the first gradient
                    kept = each["optimizer"][name]
                    states[parameter] = {
                        key: _placed(value, parameter.device, parameter in on_device) for key, value in kept.items()
                    }
                gradient = each["gradients"].get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def _placed(value: Any, device: torch.device, scalars_too: bool) -> Any:
    """Return a value of saved optimizer state on the device; scalars only move if `scalars_too`."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, copy=True) if scalars_too or value.ndim else value.clone()


# torch's modules have one of the first two; transformers' models, and many users' models, the third.
_INITIALIZERS = ("reset_parameters", "_reset_parameters", "init_weights")


def redrawn(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose trained weights are re-initialized by the modules' own initializers.

    Children are initialized before their parent, as in `torch.nn.Module.apply`. Frozen weights and their buffers are
    the model's. The global random state does not change.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> torch.equal(redrawn(layer, 1).weight, layer.weight), torch.equal(redrawn(layer, 1).bias, layer.bias)
        (False, False)
    """
    other = copied(model)
    trained = [(parameter, parameter.device) for parameter in other.parameters() if parameter.requires_grad]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for parameter, _ in trained:
            # On the CPU: a GPU draws other numbers, and some trainers have not moved the model yet.
            # Fill with NaN: weights that are still NaN afterwards were not initialized.
            parameter.data = torch.full_like(parameter, torch.nan, device="cpu")
        # Children first, so that a parent's initializer (transformers' `_init_weights`) overrides their defaults.
        for module in _children_first(other):
            vars(module).pop("_is_hf_initialized", None)  # otherwise transformers skips it
            draw = next((getattr(module, name) for name in _INITIALIZERS if hasattr(module, name)), None)
            if draw is not None:
                draw()
        for parameter, device in trained:
            parameter.data = parameter.data.to(device)
        # Frozen weights and their buffers (a quantized base with scales) come from the original.
        for name, tensor in _kept(model):
            prefix, _, own = name.rpartition(".")
            getattr(other.get_submodule(prefix), own).copy_(tensor)
    for name, parameter in other.named_parameters():
        if parameter.requires_grad and parameter.isnan().any():
            raise MatchError(
                "distill",
                f"every trained weight of a peer must be re-initialized, but nothing initialized {name}",
                "give its module a reset_parameters method, or create the other students yourself and pass them as "
                "peers",
            )
    return other


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        frozen = {name: parameter for name, parameter in own.items() if not parameter.requires_grad}
        for name, tensor in {**frozen, **(dict(module.named_buffers(recurse=False)) if frozen else {})}.items():
            yield f"{prefix}.{name}" if prefix else name, tensor


class MutualComparison(Comparison):
    """Compares every student with every other in one micro-batch: ``mean over j != i of D(p_j || p_i)``.

    All are updated in the same optimizer step, from outputs of the same weights. (Algorithm 1 of Zhang et al., 2017,
    arXiv:1706.00384, updates them in turn, each from the others' newest outputs.)
    """

    trains_others = True

    def __init__(self, config: DistillConfig, model: nn.Module, peers: Peers, context: Context) -> None:
        sizes = [sum(each.numel() for each in module.parameters()) for module in peers.modules]
        report = {"teacher": f"mutual learning of {len(sizes) + 1} students", "peer_parameters": sizes}
        super().__init__(config, peers, report)
        self._model, self._peers, self._context = model, peers, context
        self._latest: list[tuple[Tensor, Tensor]] = []

    def begin(self, context: Context) -> None:
        """Add the peers to the optimizers."""
        self._peers.join_optimizers(context)

    def compare(self, batch: StudentBatch) -> Compared:
        """Return the student's divergence from its peers, and keep each peer's divergence from the others."""
        config = self.config
        mine = find_outputs(batch.forward.output, config.logits, "student")
        if mine.kind == EMBEDDINGS:
            rule = "teacher must not be mutual for embeddings, because their axes differ in meaning between students"
            raise ConfigError("distill", rule, "pass a trained teacher")
        divergence = self._divergence(mine)
        of_classes = is_of_classes(divergence)
        studied = self._peers.study(self._model, batch.forward, self._context)
        outputs = [mine, *(find_outputs(output, config.logits, "peer") for _, output in studied)]
        for other in outputs[1:]:
            check_outputs(mine, other, of_classes=of_classes)
        mask = batch.mask(mine, of_classes=of_classes)
        everyone = [batch.parts(each, of_classes=of_classes) for each in outputs]
        totals = []
        for ours in everyone:
            # The others are fixed targets here; each gets its gradient in its own term.
            sums = [
                difference(config, divergence, part, its.detach(), mask, batch.temperature)
                for theirs in everyone
                if theirs is not ours
                for part, its in zip(ours, theirs, strict=True)
            ]
            totals.append(torch.stack([total for total, _ in sums]).mean())
            # All sums use the same mask, so their counts are equal.
            count = sums[0][1]
        self._latest = list(zip((task for task, _ in studied), totals[1:], strict=True))
        return Compared(totals[0], count, mask)

    def join(self, mixed: Tensor, task_loss: Tensor, alpha: float, count: Tensor, context: Context) -> Tensor:
        """Return a loss with the student's value and the gradients of all students' losses."""
        losses = [mix(task, context.normalize(total, count), alpha) for task, total in self._latest]
        tasks = [task.detach() for task, _ in self._latest]
        self._peers.note_losses([task_loss, *tasks], share_of(count, context))
        self.figures = {"distill/peer_task_loss": torch.stack([task.to(mixed.device) for task in tasks]).mean()}
        self._latest = []
        together = torch.stack([loss.to(mixed.device) for loss in losses]).sum()
        if world_size() > 1:
            # DDP does not know the peers. Average at the end of each backward, before a scaler checks for overflow, so
            # that all processes skip the same steps.
            together.register_hook(  # type: ignore[no-untyped-call]
                lambda _: Variable._execution_engine.queue_callback(self._peers.average_gradients)  # type: ignore[attr-defined]
            )
        # The value is the student's loss, which is logged. The gradient is the sum of all.
        return mixed + (together - together.detach())

    def detach(self) -> None:
        """Remove the peers from the optimizers, and record which student was best."""
        names = ["student", *(f"peer {number}" for number in range(1, len(self._peers.losses)))]
        losses = dict(zip(names, self._peers.losses.tolist(), strict=True))
        self.report |= {"task_losses": losses, "best": min(losses, key=lambda name: losses[name])}
        self._peers.detach()


def make_peers(config: DistillConfig, model: nn.Module, student: nn.Module, context: Context) -> Peers:
    """Return the other students of a model that no technique has changed yet."""
    modules: list[nn.Module] = []
    for given in config.given_peers:
        module = load_named(given, student, context, trust_remote_code=config.trust_remote_code)
        check_separate(model, module)
        check_heads(student, module, divergence=config.divergence, logits=config.logits)
        # If the student is a part of the model, each peer also gets a copy of the rest for its task loss.
        modules.append(module if student is model else copied(model, {id(student): module}))
    for _ in range(config.drawn_peers):
        modules.append(redrawn(model, int(torch.randint(2**31, (), generator=context.generator))))
    for number, module in enumerate(modules, 1):
        wrong = ""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            wrong = f"have trainable weights, got none in peer {number}"
        elif any(_same(module, other) for other in [model, *modules[: number - 1]]):
            wrong = f"differ, but peer {number} has the same weights as another student; draw them from another seed"
        if wrong:
            raise ConfigError("distill", f"peers must {wrong}")
    return Peers(modules, config.student or "")


def _same(first: nn.Module, second: nn.Module) -> bool:
    if first is second:
        return True
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    return ours.keys() == theirs.keys() and all(
        tensor.shape == theirs[name].shape and torch.equal(tensor, theirs[name].to(tensor.device))
        for name, tensor in ours.items()
    )
