"""DP-SGD as a technique: the optimizer sees only a noised sum of clipped gradients of single examples."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from shared_core.distributed.collectives import all_reduce_, any_rank, broadcast_, local_part, world_size
from shared_core.distributed.sharded_tensors import is_sharded, place_of, reshard_, sum_parts
from shared_core.engine.plan import Plan, Touched, trained
from shared_core.engine.saving.state_file import rng_restored
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.modules.calls import RunHook, modes_restored
from shared_core.printing import counted, share_text
from shared_core.privacy.accountant import Spending, epsilon, noise_multiplier_for
from shared_core.privacy.config import PrivacyConfig
from shared_core.privacy.per_sample_gradients import PerSample, check_model
from shared_core.privacy.sampling import PoissonBatches, Secret, check_loader, loader_options

_SAMPLING = "poisson"


class DifferentialPrivacy(Technique):
    """Replaces each step's gradient by ``(Σᵢ clip(gᵢ, C) + N(0, σ²C²)) / B``, and tracks the epsilon spent.

    The sum runs over a Poisson sample of the data with B expected examples, over all micro-batches and processes. Noise
    is added once. Batches must come from `loader`; the front ends take care of this.

    Source: Abadi et al. 2016, arXiv:1607.00133.

    Example:
        >>> from shared_core.engine.recipe import Recipe
        >>> from shared_core.engine.session import Session
        >>> model = nn.Linear(4, 2)
        >>> session = Session(Recipe.from_dict({"dp": {"noise_multiplier": 1.0}}))
        >>> session.attach(model)
        >>> data = torch.utils.data.TensorDataset(torch.randn(40, 4))
        >>> loader = session.techniques["dp"].loader(DataLoader(data, batch_size=10))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session.begin([optimizer], total_steps=4)  # doctest: +ELLIPSIS
        efftrain: dp: ...
        >>> for (batch,) in loader:  # doctest: +ELLIPSIS
        ...     session.loss(model(batch).square().sum(1).mean()).backward()
        ...     session.before_step()
        ...     optimizer.step()
        ...     _ = session.after_step()
        ...     optimizer.zero_grad()
        efftrain: dp: could not check that the loss is a mean over the examples: the model does not return it
        >>> round(session.figures()["dp/epsilon"], 2)
        4.87
        >>> session.finish()
    """

    makes_gradients_private: ClassVar[bool] = True
    needs_window_mean: ClassVar[bool] = True
    config: PrivacyConfig

    def __init__(self, config: PrivacyConfig) -> None:
        super().__init__(config)
        self._per_sample: PerSample | None = None
        self._model: nn.Module | None = None
        self._layers: dict[str, nn.Module] = {}
        self._batches: PoissonBatches | None = None
        self._secret: Secret | None = None
        self._draws = self._micro_batch = 0
        self._spent: list[Spending] = []
        self._noise = config.noise_multiplier
        self._sums: dict[str, Tensor] = {}
        self._factor: Tensor | None = None
        self._ghosts: Mapping[str, bool] = {}
        self.checks_loss = config.check_loss
        """True until the loss was checked to be a mean over examples. A front end that can check it calls
        `check_loss`."""
        self.sees_loss_in_forward = True
        """True if the loss that the model's forward returns is checked; front ends that check it set False."""
        self._shown = (0, 0.0)
        self.weights: Tensor | None = None
        """Set by a front end before `loss`: the factor that turns each row's share of the loss into the row's own loss;
        None if the loss is the mean over rows."""

    # -- start

    def attach(self, context: Context) -> Touched:
        """Register the hooks."""
        model = context.model
        context.undo.callback(self._detach)
        functorch = self.config.grad_sample_mode == "functorch"
        check_model(model, functorch)
        self._per_sample = PerSample(model, functorch)
        self._per_sample.rows_ahead = lambda: self.rows if self._batches else 1
        self._model = model
        self._layers = {name: module for name, module in model.named_modules() if module._parameters}
        self._note = context.note
        self._handle = model.register_forward_pre_hook(RunHook(self._before_forward), with_kwargs=True)
        return trained(model)

    def _detach(self) -> None:
        """Remove the hooks."""
        if self._per_sample is not None:
            self._per_sample.remove()
            self._handle.remove()
        self._per_sample, self._sums = None, {}

    def sample(self, loader: Any, batch_size: int, accumulate: int = 1) -> PoissonBatches:
        """Return batches that replace those of a DataLoader, which must hold the whole data set on every process."""
        check_loader(loader)
        if self._secret is None:
            self._secret = self._make_secret()
        self._batches = PoissonBatches(
            len(loader.dataset),
            batch_size,
            accumulate,
            lambda: self._known(self._secret),
            lambda: self._draws * accumulate + self._micro_batch,
        )
        return self._batches

    def loader(
        self, loader: DataLoader[Any], accumulate: int = 1, batch_size: int | None = None, **more: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader with Poisson-sampled batches of the same expected size."""
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", 1) if batch_size is None else batch_size
        batches = self.sample(loader, size, accumulate)
        made: Any = type(loader) if more else DataLoader
        result: DataLoader[Any] = made(loader.dataset, batch_sampler=batches, **loader_options(loader), **more)
        return result

    def _make_secret(self) -> Secret:
        seed = self.config.seed
        key = secrets.token_bytes(16) if seed is None else hashlib.sha256(str(seed).encode()).digest()[:16]
        device = next(self._known(self._model).parameters()).device
        shared = broadcast_(torch.tensor(list(key), dtype=torch.uint8, device=device))
        return Secret(bytes(shared.tolist()))

    def _known(self, value: Any) -> Any:
        if value is None:
            raise TrainingError(
                "dp",
                "training batches must be drawn by Poisson sampling, but were not",
                "pass the DataLoader to efftrain.hf.prepare, to training(loader=...) or, with Fabric, "
                "to fabric.setup_dataloaders, and train on the returned loader",
            )
        return value

    def plan(self, context: Context) -> Plan:
        """Return the plan: `missing` tells if more than `target_epsilon` was spent, `guards` are the hooked layers."""
        target, shown = self.config.target_epsilon, self._shown_epsilon()
        return Plan(
            missing="" if target is None or shown <= target else f"epsilon {shown:.4g} was spent, not {target:g}",
            guards=self._layers,  # a replaced layer would get only noise
        )

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Choose the noise multiplier and report the epsilon at the end of the run."""
        config, batches = self.config, self._known(self._batches)
        total, rule = context.total_steps, ""
        left = None if total is None else max(total - context.step, 0)
        if config.delta >= 1 / batches.num_examples:
            rule = f"delta must be below 1 / {batches.num_examples} (the number of examples), got {config.delta}"
            remedy = "with a larger delta, even publishing a few whole examples would count as private"
        elif config.target_epsilon is not None and left is None:
            rule, remedy = "target_epsilon needs a known number of steps, got none", "set max_steps"
        if rule:
            raise ConfigError("dp", rule, remedy)
        if config.target_epsilon is not None and left is not None:
            planned = epsilon(self._planned(left), config.delta, config.accountant) if self._noise else 0.0
            if (
                not 0.98 * config.target_epsilon <= planned <= config.target_epsilon
            ):  # a resumed run keeps its noise if possible
                self._noise = noise_multiplier_for(
                    config.target_epsilon, batches.sample_rate, max(left, 1), config.delta,
                    accountant=config.accountant, spent=self._spent,
                )  # fmt: skip
        end = "" if left is None else f"; after {total} steps epsilon {self._after(left):.4g} at delta {config.delta:g}"
        clipped = ". The trainer clips the noised gradient again, which costs no privacy" * context.clips_gradients
        context.services.say(
            f"efftrain: dp: poisson sampling with rate {batches.sample_rate:.4g} of {batches.num_examples} examples, "
            f"noise multiplier {self._noise:.4g}, clipped at {config.max_grad_norm:g}{end}, accountant "
            f"{config.accountant}{clipped}"
        )

    def _planned(self, steps: int) -> list[Spending]:
        return [*self._spent, (float(self._noise or 0), self._known(self._batches).sample_rate, steps)]

    def _after(self, steps: int) -> float:
        return epsilon(self._planned(steps), self.config.delta, self.config.accountant)

    # -- one step

    def _batches_in_use(self) -> PoissonBatches:
        batches: PoissonBatches = self._known(self._batches)
        self._known(batches.is_read or None)
        return batches

    @property
    def rows(self) -> int:
        """Rows of the next micro-batch, at least one."""
        return max(len(self._known(self._batches).part(self._draws, self._micro_batch)), 1)

    def check_loss(self, whole: float, parts: list[tuple[int, float]]) -> None:
        """Raise if a batch's loss is not the mean of its parts' losses, weighted by rows. Checked once."""
        self.checks_loss = False
        mean = sum(rows * loss for rows, loss in parts) / sum(rows for rows, _ in parts)
        if abs(whole - mean) > 1e-2 * max(abs(whole), abs(mean), *(abs(loss) for _, loss in parts)):
            raise CompatibilityError(
                "dp",
                f"loss must be the mean of the examples' own losses, got {whole:.6g} for a batch whose "
                f"halves have {', '.join(f'{loss:.6g} ({rows} rows)' for rows, loss in parts)}",
                "with a mean over tokens, or terms between examples, one example changes the weight of others: average "
                "over each row first, then over rows (if the loss draws random numbers, set check_loss: false)",
            )

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the loss of a model that returns it, before the first forward with at least two drawn rows."""
        if self._batches is None or not (self.sees_loss_in_forward and model.training and torch.is_grad_enabled()):
            return
        self._batches_in_use()
        if not self.checks_loss:
            return
        _check_labels(kwargs.get("labels"))
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        rows = self.rows
        if not any(isinstance(value, Tensor) and value.shape[:1] == (rows,) for value in named.values()):
            rows = 0

        def run(given: dict[Any, Any]) -> Any:
            return model(*(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs})

        found = losses_of_halves(model, run, named, rows)
        if found:
            self.check_loss(*found)
        elif found is not None:
            self.checks_loss = False
            self._note("dp: could not check that the loss is a mean over the examples: the model does not return it")

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Make the backward of this loss clip each example's gradient."""
        if self._per_sample is None or not task_loss.requires_grad:
            return task_loss
        batches = self._batches_in_use()
        # A micro-batch outside an accumulation window would be counted as part of another draw.
        self._check_window(self._micro_batch < batches.accumulate, "more")
        self._per_sample.num_examples = rows = self.rows
        weights, self.weights = self.weights, None
        # By default the loss is a mean over rows, so each row's own loss is rows times its share.
        if weights is None:
            weights = torch.full((rows,), float(rows), device=task_loss.device)
        self._factor = weights * bool(batches.part(self._draws, self._micro_batch))
        self._micro_batch += 1
        # The gradient that arrives at the loss is the trainer's factor (1 / accumulation, its scaler).
        task_loss.register_hook(self._after_backward)  # type: ignore[no-untyped-call]
        return task_loss

    def _check_window(self, is_right: bool, found: str) -> None:
        if not is_right:
            number = self._known(self._batches).accumulate
            raise TrainingError(
                "dp",
                f"a step must have all {number} micro-batches of its draw, got {found}",
                "use the same accumulation in the trainer and in loader(...), skip no batch, and return the loss "
                "of each",
            )

    def _after_backward(self, arriving: Tensor) -> None:
        self._factor = self._known(self._factor) / arriving
        # The callback queues itself once more, to run after the callbacks that FSDP2 and DDP queue.
        queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
        # Queued twice: this runs after the callbacks that DDP and FSDP2 queue for the end of backward.
        queue(lambda: queue(self._clip))

    def _clip(self) -> None:
        """Clip and sum the micro-batch's gradients after its backward."""
        per_sample, model = self._known(self._per_sample), self._known(self._model)
        reshard_(model)
        parameters = dict(model.named_parameters())
        for name, total in per_sample.clipped_sums(self._known(self._factor), self.config.max_grad_norm):
            if is_sharded(parameters[name]):
                total = sum_parts(total, parameters[name])
            if name in self._sums:  # checkpoints load to the CPU
                total = self._sums[name].to(total.device) + total
            self._sums[name] = total
        self._factor, self._ghosts = None, per_sample.ghosts

    def before_step(self, context: Context) -> None:
        """Replace every gradient by the noised mean, and count the step."""
        batches = self._known(self._batches)
        # With another number of micro-batches the draw would differ from the one in the accounting.
        self._check_window(self._micro_batch == batches.accumulate and self._factor is None, str(self._micro_batch))
        trained = {name: value for name, value in context.model.named_parameters() if value.requires_grad}
        std = float(self._noise or 0) * self.config.max_grad_norm
        secret, secure_mode = self._known(self._secret), self.config.secure_mode
        noise = secret.noise(trained.values(), std, self._draws, secure_mode=secure_mode)
        for (name, parameter), drawn in zip(trained.items(), noise, strict=True):
            total = self._sums.pop(name, None)
            # A parameter that no example reached still gets noise: its gradient is 0 plus N(0, σ² C²).
            if total is None:
                total = torch.zeros_like(local_part(parameter))
            if not is_sharded(parameter):  # sharded ones were summed in each micro-batch
                all_reduce_(total, "sum")
            # Divided by the expected batch size, a constant, because the true size is private.
            total.add_(drawn[place_of(parameter)].to(total)).div_(batches.expected)
            lies_alike = (total.dtype, total.device) == (parameter.dtype, parameter.device)
            if lies_alike and not is_sharded(parameter) and total.stride() == parameter.stride():
                parameter.grad = total
            else:
                parameter.grad = torch.empty_like(parameter)
                local_part(parameter.grad).copy_(total)
        self._sums, self._micro_batch = {}, 0
        # Counted here, because the noised gradient now exists, even if the optimizer skips the step.
        self._draws += 1
        self._spent = _with_step(self._spent, float(self._noise or 0), batches.sample_rate)

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the steps spent, the secret behind batches and noise, and sums of an unfinished step."""
        return {
            "secret": self._secret.key.hex() if self._secret else "",
            "draws": self._draws,
            "micro_batch": self._micro_batch,
            "spent": [list(part) for part in self._spent],
            "noise_multiplier": self._noise,
            "sums": dict(self._sums),
            "processes": world_size(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. What this run has already spent stays counted."""
        try:
            draws, micro_batch = int(state["draws"]), int(state["micro_batch"])
            spent = [(float(noise), float(rate), int(steps)) for noise, rate, steps in state["spent"]]
            key, noise, sums = bytes.fromhex(state["secret"]), state["noise_multiplier"], dict(state["sums"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("dp", f"state must be one that dp saved, got {error!r}") from error
        if sums and state.get("processes", world_size()) != world_size():
            raise CheckpointError(
                "dp",
                f"checkpoint must be from between two steps to resume with {world_size()} processes, got one from "
                f"within a step, where each of {state['processes']} processes holds a part of the sum",
                "resume with the same number of processes",
            )
        # An earlier checkpoint of this run has spent less, but what was spent stays spent.
        if draws < self._draws:
            return  # at the end of a run its best model is loaded
        self._draws, self._micro_batch, self._spent, self._sums = draws, micro_batch, spent, sums
        self._secret = Secret(key) if key else self._secret
        if self.config.target_epsilon is not None:
            self._noise = noise

    # -- figures

    def spent(self) -> float:
        """Return the epsilon spent by all steps so far."""
        return epsilon(self._spent, self.config.delta, self.config.accountant)

    def figures(self) -> dict[str, float]:
        """Return ``dp/epsilon``, the epsilon spent so far."""
        return {} if self._noise == 0 else {"dp/epsilon": self._shown_epsilon()}

    def _shown_epsilon(self) -> float:
        if self._shown[0] != self._draws:
            self._shown = self._draws, self.spent()
        return self._shown[1]

    def report(self) -> dict[str, Any]:
        """Return the guarantee (epsilon, delta, accountant, sampling) and the rate, noise and clipping behind it."""
        config, batches = self.config, self._batches
        return {
            "epsilon": "infinite" if self._noise == 0 else self.spent(),
            "delta": config.delta,
            "accountant": config.accountant,
            "sampling": _SAMPLING,
            "sample_rate": batches.sample_rate if batches else None,
            "examples": batches.num_examples if batches else None,
            "expected_batch": batches.expected if batches else None,
            "noise_multiplier": self._noise,
            "max_grad_norm": config.max_grad_norm,
            "secure_mode": config.secure_mode,
            "steps": sum(steps for _, _, steps in self._spent),
            "norms_by_ghost": sorted(name for name, is_ghost in self._ghosts.items() if is_ghost),
            "norms_by_example": sorted(name for name, is_ghost in self._ghosts.items() if not is_ghost),
            "seed": "drawn from the system's entropy" if config.seed is None else f"{config.seed}, known to readers",
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report as plain sentences, the result first. The report may come from a file."""
        epsilon = report["epsilon"]
        spent = epsilon if isinstance(epsilon, str) else f"{epsilon:.3g}"
        steps = counted(report["steps"], "step")
        lines = [f"Spent epsilon {spent} at delta {report['delta']:g} in {steps} ({report['accountant']} accountant)."]
        if report["sample_rate"] is not None:
            lines.append(
                f"Each step drew {share_text(report['sample_rate'])} of {counted(report['examples'], 'example')}, "
                f"clipped to norm {report['max_grad_norm']:g}, with noise multiplier {report['noise_multiplier']:.3g}."
            )
        return lines


def _check_labels(labels: Any) -> None:
    """Raise if rows have different numbers of label tokens, since a model's own loss is the mean over all tokens."""
    # Comparing halves does not detect this while all tokens have about the same loss.
    if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        counts = labels.flatten(1).ne(-100).sum(1)
        if counts.min() != counts.max():
            raise CompatibilityError(
                "dp",
                f"all rows must have equally many labels, got {int(counts.min())} to {int(counts.max())}: the model's "
                "loss is a mean over tokens, so one example changes the weight of others",
                "make rows equally long, average over each row first in your own loss (check_loss: false), or use "
                "hf_eff with transformers' Trainer, which weights all rows equally",
            )


def _with_step(spent: list[Spending], noise: float, rate: float) -> list[Spending]:
    if spent and spent[-1][:2] == (noise, rate):
        return [*spent[:-1], (noise, rate, spent[-1][2] + 1)]
    return [*spent, (noise, rate, 1)]


_STATE_DIMS = 3


def losses_of_halves(
    model: nn.Module, run: Callable[[Any], Any], batch: Any, rows: int
) -> tuple[float, list[tuple[int, float]]] | tuple[()] | None:
    """Return the loss of a batch and the rows and losses of its halves; empty if the outputs hold no loss.

    None if the batch has a single row on any process, or its rows cannot be identified.
    """
    cuts = [(slice(0, rows // 2), rows // 2), (slice(rows // 2, rows), rows - rows // 2)]
    # All processes or none, because a sharded module gathers its weights in every forward.
    if any_rank(rows < 2 or _is_unclear(batch, rows), next(model.parameters()).device):
        return None
    with rng_restored(), modes_restored(model), torch.no_grad():
        for part in model.modules():  # no dropout; `eval()` may have side effects
            part.training = False
        outputs = [run(part) for part in (batch, *(_cut(batch, cut, rows) for cut, _ in cuts))]
    found: list[Any] = [
        output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output) for output in outputs
    ]
    if not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in found):
        return ()
    whole, *halves = map(float, found)
    return whole, [(count, loss) for (_, count), loss in zip(cuts, halves, strict=True)]


def _cut(batch: Any, rows: slice, count: int) -> Any:
    """Return these rows of all values in a batch that have one entry per example."""
    if isinstance(batch, Tensor):
        if batch.dim() and len(batch) == count:
            return batch[rows]
        return batch[:, rows] if _is_state(batch, count) else batch
    if isinstance(batch, PackedSequence):
        padded, lengths = pad_packed_sequence(batch, batch_first=True)
        return pack_padded_sequence(padded[rows], lengths[rows], batch_first=True, enforce_sorted=False)
    if isinstance(batch, list | tuple):
        if len(batch) == count and not any(isinstance(value, Tensor) and value.dim() for value in batch):
            return batch[rows]
        values = [_cut(value, rows, count) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    parts = {name: _cut(value, rows, count) for name, value in _fields(batch).items()}
    if not isinstance(batch, MutableMapping) and not dataclasses.is_dataclass(batch):
        return parts or batch
    other: Any = copy.copy(batch)  # its class may take other arguments (defaultdict)
    (vars(other) if dataclasses.is_dataclass(batch) else other).update(parts)
    return other


def _fields(batch: Any) -> Mapping[Any, Any]:
    """Return the values of a mapping or a dataclass by name; empty for other types."""
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch if isinstance(batch, Mapping) else {}


def _is_state(value: Tensor, count: int) -> bool:
    """Return True if a tensor's second dimension is the examples, like (layers, batch, width) of torch.nn.LSTM."""
    return value.dim() == _STATE_DIMS and value.shape[1] == count


def _is_unclear(batch: Any, count: int) -> bool:
    """Return True if either dimension could be the examples. Poisson sampling soon draws another number."""
    if isinstance(batch, Tensor):
        return _is_state(batch, count) and len(batch) == count
    values = batch if isinstance(batch, list | tuple) else _fields(batch).values()
    return any(_is_unclear(value, count) for value in values)
