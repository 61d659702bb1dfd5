"""Whole training steps of every technique on a pretended device: none mixes devices, few let the host wait.

A technique that is registered has a case of its own here. `CASES` holds, beside a recipe, how often the host may wait
for the device, counted over all layers of the small model; a change of a number is a decision.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import importlib
import io
import itertools
import sys
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from eff_kernels._triton import launch
from peers import ACCUMULATE, ROWS, STEPS, TOKENS, Ddp, two_processes
from pretended_device import CUDA, PretendedDevice, on_pretended_device
from small_encoder import VOCABULARY, Encoder
from torch import Tensor, nn
from torch.nn import functional as F

from shared_core import Session
from shared_core.distillation.chunked_loss import chunked_kd_loss
from shared_core.engine.observers.micro_batches import MicroBatchMeans
from shared_core.engine.registry import REGISTRY
from shared_core.engine.services import SavedCheckpoint, Services
from shared_core.errors import ConfigError
from shared_core.fp8 import native
from shared_core.numerics.deferred_checks import checked_together
from shared_core.pruning.mask_dynamics import rigl_mask
from shared_core.pruning.selection import prune_masks

pytestmark = pytest.mark.gpu_lane
TABLE = Path(__file__).with_name("steps.csv")
_SLACK = 1.05  # versions of torch take some operators more or fewer


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe, and how often the host may wait."""

    recipe: dict[str, dict[str, Any]]
    begin: int = 0
    """In `Session.begin`."""
    worst: int = 0
    """In the step with most of them: the first, or that of an update."""
    steady: int = 0
    """In each of the last two steps."""
    metrics: int = 0
    """When figures are logged."""
    evaluation: int = 0
    """Around a validation."""
    why: str = ""
    """Why the host waits in a steady step."""


AT = {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}
EACH = {"sparsity": 0.5, "begin": 0, "end": STEPS, "every": 1}
UPDATES = "masks change in every step here"
FINITE = "a step that is not finite is discarded"
SIZES = "the form goes by the values, and its size must be known"
SKIPS = "a step that overflows is not called"
# fmt: off
CASES = {
    "none": Case({}),
    "matmul": Case({"matmul": {"precision": "high"}}, begin=2),
    "low_rank": Case({"low_rank": {"rank": 16, "force": True, "min_size": 1}}),
    # the first step looks whether it moved the adapters
    "lora": Case({"lora": {"rank": 4, "base": "none"}}, worst=1),
    "lora nf4": Case({"lora": {"rank": 4, "base": "nf4"}}, begin=1, worst=1),
    "lora int8": Case({"lora": {"rank": 4, "base": "int8"}}, begin=2, worst=17, steady=16, evaluation=8,
                      why="bitsandbytes looks for columns with outliers in each product"),
    "primary_weights": Case({"primary_weights": {"kind": "fp32_copy"}}, worst=1),
    "primary_weights stochastic": Case({"primary_weights": {"kind": "stochastic_rounding"}}, worst=1),
    "prune": Case({"prune": AT}, begin=1, worst=3),
    "prune cubic": Case({"prune": {"sparsity": 0.8, **EACH}}, begin=1, worst=3, steady=3, why=UPDATES),
    "prune n_m": Case({"prune": {**AT, "granularity": "n_m", "sr_ste": 2e-4}}, begin=1, worst=2, steady=2, why=UPDATES),
    "prune movement": Case({"prune": {**EACH, "criterion": "movement"}}, begin=1, worst=4, steady=4, why=UPDATES),
    "prune taylor": Case({"prune": {**EACH, "criterion": "taylor"}}, begin=1, worst=4, steady=4, why=UPDATES),
    "prune neuron": Case({"prune": {**AT, "granularity": "neuron"}}, begin=1, worst=3),
    "prune block": Case({"prune": {**AT, "granularity": "block"}}, begin=1, worst=5),
    "prune rigl": Case({"prune": {**EACH, "begin": 1, "schedule": "one_shot", "dynamic": "rigl"}},
                       begin=1, worst=3, steady=2, why=UPDATES),
    "prune l1": Case({"prune": {**AT, "regularizer": "l1"}}, begin=1, worst=3),
    "lottery": Case({"lottery": {"rewind_to": 1, "out": "out"}}, worst=2),
    "cluster": Case({"cluster": {"bits": 4, "begin": 1}}, worst=1),
    "qat": Case({"qat": {"scheme": "int8"}}, begin=12, worst=1),
    "qat int8_dynamic": Case({"qat": {"scheme": "int8_dynamic"}}, begin=12),
    "qat int4_weight": Case({"qat": {"scheme": "int4_weight"}}, begin=12),
    "qat lsq": Case({"qat": {"scheme": "int8", "range": "lsq"}}, begin=14, worst=2),
    "qat lsq_plus": Case({"qat": {"scheme": "int8", "range": "lsq_plus"}}, begin=13, worst=2),
    "qat pact": Case({"qat": {"scheme": "int8", "range": "pact"}}, begin=13, worst=2),
    "qat fp8": Case({"qat": {"scheme": "fp8"}}, begin=12),
    "qat ternary": Case({"qat": {"scheme": "ternary"}}, begin=12),
    "qat binary": Case({"qat": {"scheme": "binary"}}, begin=12),
    "qat mxfp4": Case({"qat": {"scheme": "mxfp4"}}, begin=12),
    "qat nvfp4": Case({"qat": {"scheme": "nvfp4"}}, begin=12),
    "qat stochastic": Case({"qat": {"scheme": "int8", "rounding": "stochastic"}}, begin=12, worst=1),
    "fp8": Case({"fp8": {"recipe": "tensorwise"}}, begin=1, worst=1, steady=1, why=FINITE),
    "fp8 delayed": Case({"fp8": {"recipe": "delayed"}}, begin=4, worst=1, steady=1, why=FINITE),
    "fp8 rowwise": Case({"fp8": {"recipe": "rowwise"}}, begin=1, worst=1, steady=1, why=FINITE),
    "fp8 blockwise": Case({"fp8": {"recipe": "blockwise"}}, begin=1, worst=1, steady=1, why=FINITE),
    "fp8 mx": Case({"fp8": {"recipe": "mx"}}, begin=1, worst=1, steady=1, why=FINITE),
    "fp8 s2fp8": Case({"fp8": {"recipe": "s2fp8"}}, begin=1, worst=1, steady=1, why=FINITE),
    "fp8 int16": Case({"fp8": {"recipe": "int16"}}, begin=4, worst=1, steady=1, why=FINITE),
    "checkpointing": Case({"checkpointing": {"policy": "block"}}),
    "checkpointing selective": Case({"checkpointing": {"policy": "selective"}}),
    "checkpointing budget": Case({"checkpointing": {"policy": "budget:0.7"}}, worst=212, steady=2,
                                 why="the plan is checked by one measured step, here among the last two"),
    "activations": Case({"activations": {"pack": "int8", "min_size": 32}}, worst=84, steady=84, why=SIZES),
    "activations exact": Case({"activations": {"pack": "exact", "min_size": 32}}, worst=82, steady=82, why=SIZES),
    "activations offload": Case({"activations": {"pack": "none", "offload": True, "min_size": 32}}),
    "distill": Case({"distill": {"temperature": 2.0}}, metrics=2),
    "distill hidden": Case({"distill": {"hidden": ["layers.0=layers.0"]}}, metrics=2),
    "distill chunked": Case({"distill": {"chunked": True}}, worst=2, steady=2, metrics=2,
                            why="rows with a label are picked"),
    "distill ema": Case({"distill": {"teacher": "ema"}}, metrics=2),
    "loss_scale": Case({"loss_scale": {"kind": "dynamic"}}, worst=4, steady=1, metrics=1, why=SKIPS),
    "loss_scale auto": Case({"loss_scale": {"kind": "auto"}}, worst=4, steady=1, metrics=1, why=SKIPS),
    "dp": Case({"dp": {"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3}}, worst=3, steady=2,
               why="a gradient that is not finite must not become a sum"),
    "comm": Case({"comm": {"hook": "bf16"}}),
    "comm powersgd": Case({"comm": {"hook": "powersgd"}}, worst=10),
    "average": Case({"average": {"kind": "ema"}}),
    "average swa": Case({"average": {"kind": "swa", "begin": 1}}),
    "average last_k": Case({"average": {"kind": "last_k"}}),
    "soup": Case({"soup": {"kind": "uniform"}}),
}
# fmt: on
PHASES = ("begin", "worst", "steady", "metrics", "evaluation")
LIBRARIES = {"lora": "peft.tuners.lora.bnb", "dp": "opacus", "comm": "torch.testing._internal.distributed.fake_pg"}
MAIN_JOB = ("prune", "distill", "qat", "soup")


def make_model(recipe: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Encoder().to(CUDA)
    return model.bfloat16() if "primary_weights" in recipe else model


class LoopServices(Services):
    """What a loop can do for a technique here."""

    def __init__(self, plain: nn.Module) -> None:
        self.plain, self.wrapped = plain, plain

    def wrapped_model(self) -> nn.Module:
        return self.wrapped

    weights: dict[str, Tensor] | None = None

    def checkpoints(self) -> list[SavedCheckpoint]:
        return [SavedCheckpoint(Path("checkpoint"), STEPS)] if self.weights else []

    def load_weights(self, path: Path) -> dict[str, Tensor]:
        return self.weights or {}

    def calibrate(self, num_batches: int) -> None:
        with torch.no_grad():
            self.plain(torch.zeros(1, TOKENS, dtype=torch.long, device=CUDA))

    def say(self, text: str) -> None: ...


class Run:
    """A session over a model on the device, its optimizer and data."""

    def __init__(
        self, device: PretendedDevice, recipe: dict[str, Any], dtype: torch.dtype | None, folder: Path
    ) -> None:
        self.device, self.dtype = device, dtype
        recipe = {key: dict(options) for key, options in recipe.items()}
        if "distill" in recipe:
            recipe["distill"].setdefault("teacher", Encoder().to(CUDA).eval())
        if "lottery" in recipe:
            recipe["lottery"]["out"] = str(folder)
        self.model = make_model(recipe)
        self.services = LoopServices(self.model)
        self.session = Session(recipe, services=self.services)
        self.session.attach(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        scaling: Any = self.session.techniques.get("loss_scale")
        self.scaler = scaling.make_scaler("cuda") if scaling else None
        self.forward = self.model
        ids = torch.randint(VOCABULARY, (64, TOKENS), generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(ids, (ids * 5 + 1) % VOCABULARY)
        loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
        if "dp" in recipe:
            private: Any = self.session.techniques["dp"]
            loader = private.loader(loader, ACCUMULATE)
        if "comm" in recipe:
            self.forward = self.services.wrapped = Ddp(self.model)
        self.batches = itertools.cycle(loader)

    def begin(self) -> None:
        self.session.begin([self.optimizer], total_steps=STEPS + 2)

    def waits(self) -> Counter[tuple[str, str]]:
        return self.device.taken()

    def step(self) -> Counter[tuple[str, str]]:
        """Train a step; return the waits, without those for data."""
        batches = [[part.to(CUDA) for part in next(self.batches)] for _ in range(ACCUMULATE)]
        self.waits()
        self.optimizer.zero_grad()
        for ids, labels in batches:
            with self.session.forward(), torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
                logits = self.forward(ids)
                rows = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").mean(1)
                loss = self.session.loss(rows.mean()) / ACCUMULATE
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if isinstance(self.forward, Ddp):
            self.forward.reduce()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.session.before_step()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scaler is not None and self.scaler.was_skipped(self.optimizer):
            self.session.after_step(applied=False)
        else:
            self.session.after_step()
        return self.waits()

    def evaluate(self) -> Counter[tuple[str, str]]:
        ids = torch.zeros(1, TOKENS, dtype=torch.long, device=CUDA)
        self.model.eval()
        with self.session.swapped("evaluate"), torch.no_grad():
            self.model(ids)
        self.session.evaluated({"eval_loss": 1.0})
        self.model.train()
        return self.waits()

    def saved(self) -> bytes:
        """Return what a checkpoint holds."""
        file = io.BytesIO()
        with self.session.swapped("checkpoint"):
            state = {"session": self.session.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state | {"model": self.model.state_dict()}, file)
        self.session.files.bake(self.model.state_dict())
        return file.getvalue()

    def resume(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.services.weights = {name: value.cpu() for name, value in state["model"].items()}
        self.session.prepare_optimizers([self.optimizer])
        self.optimizer.load_state_dict(state["optimizer"])
        self.session.load_state_dict(state["session"])
        self.begin()


def _off_device(model: nn.Module) -> list[str]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, value in named if value.device != CUDA]


@on_pretended_device
def train(device: PretendedDevice, recipe: dict[str, Any], dtype: torch.dtype | None, folder: Path) -> dict[str, Any]:
    """Train, validate, save, resume and finish; return the waits by phase, and the operators of the last step."""
    native.why_not_native = lambda *_: None  # what a pretended product computes says nothing
    if "comm" in recipe:
        two_processes()
    run = Run(device, recipe, dtype, folder)
    found: dict[str, Any] = {}
    run.waits()
    run.begin()
    found["begin"] = run.waits()
    steps = []
    for _ in range(STEPS):
        device.launches.clear()
        device.fast = 0
        steps.append(run.step())
    found["fast"] = device.fast / max(1, sum(n for name, n in device.launches.items() if "_scaled_mm" in name))
    found["ours"] = sum(count for name, count in device.launches.items() if name.startswith("eff_kernels::"))
    found["torch"] = device.launches.total() - found["ours"]
    found["worst"] = max(steps, key=Counter.total)
    found["steady"] = max(steps[-2:], key=Counter.total)
    run.session.figures()
    found["metrics"] = run.waits()
    found["evaluation"] = run.evaluate()
    resumed = Run(device, recipe, dtype, folder)
    resumed.resume(run.saved())
    resumed.step()
    assert not _off_device(resumed.model)
    resumed.session.finish()
    assert not _off_device(resumed.model)
    return found


def import_for(case: Case) -> None:
    """Import what a case needs before the fork: once for all."""
    for key in case.recipe:
        importlib.import_module(LIBRARIES.get(key, "torch"))
        assert REGISTRY[key].technique_class


def dtype_of(name: str) -> torch.dtype | None:
    return torch.float16 if name.startswith("loss_scale") else None


def read_table() -> dict[str, tuple[int, int]]:
    """Return by case the operators of ours and of torch in a step."""
    with TABLE.open(newline="") as file:
        return {line["case"]: (int(line["ours"]), int(line["torch"])) for line in csv.DictReader(file)}


def launches_of_peer(name: str) -> int:
    for library in peers.LIBRARIES:
        importlib.import_module(library)
    return peers.launches_of(name, dtype_of(name))


def write_table() -> None:
    """Train with each case, and write the table anew."""
    lines = []
    for name, case in CASES.items():
        import_for(case)
        with tempfile.TemporaryDirectory() as folder:
            found = train(case.recipe, dtype_of(name), Path(folder))
        peer = [peers.PEERS[name][0], launches_of_peer(name)] if name in peers.PEERS else ["", ""]
        lines.append([name, found["ours"], found["torch"], *peer])
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["case", "ours", "torch", "peer", "peer's"], *lines])


def _told(waits: Counter[tuple[str, str]]) -> str:
    return "\n".join(f"  {count} {kind} at {place}" for (kind, place), count in waits.most_common())


def check(case: Case, name: str, dtype: torch.dtype | None, folder: Path, capsys: Any) -> dict[str, Any]:
    import_for(case)
    found = train(case.recipe, dtype, folder)
    numbers = ", ".join(f"{phase} {found[phase].total()}" for phase in PHASES)
    kind = str(dtype or torch.float32).removeprefix("torch.")
    with capsys.disabled():
        sys.stdout.write(f"\n{name} ({kind}): waits {numbers}; launches {found['ours']} + {found['torch']} ")
    over = [
        f"{phase} may wait {getattr(case, phase)} times, got {found[phase].total()}:\n{_told(found[phase])}"
        for phase in PHASES
        if found[phase].total() > getattr(case, phase)
    ]
    assert not over, f"{name}: " + "\n".join(over)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_step_mixes_devices_or_waits(name, dtype, tmp_path, capsys):
    found = check(CASES[name], name, dtype_of(name) or dtype, tmp_path, capsys)
    if dtype is None:
        ours, others = read_table()[name]
        told = f"{name}: a step launches {found['ours']} + {found['torch']} operators, {ours} + {others} in the table"
        assert found["ours"] <= ours, told
        assert found["torch"] <= others * _SLACK, told
        if name in ("fp8", "fp8 delayed", "fp8 rowwise"):
            assert found["fast"] == pytest.approx(1 / 3), "of a layer's three products the forward one sums fast"


MORE = {
    "primary_weights stochastic": "gradients are summed in float32; the peer sums them in bfloat16",
    "qat": "the peer's operator observes, averages, finds the scale and rounds, in several kernels that count as one",
    "loss_scale auto": "exponents of gradients are counted, to find the scale",
}
"""Of a case whose step launches more than the peer's: why."""


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_step_launches_no_more_than_that_of_the_peer(name):
    ours, theirs = sum(read_table()[name]), launches_of_peer(name)
    assert ours <= theirs or name in MORE, f"{name}: {ours} operators, {peers.PEERS[name][0]} {theirs}"


def test_the_loop_of_the_peers_is_ours():
    assert peers.launches_of("none", None) == sum(read_table()["none"])


def test_every_technique_has_a_case_and_every_wait_a_reason():
    assert {next(iter(case.recipe)) for case in CASES.values() if case.recipe} == set(REGISTRY)
    assert [name for name, case in CASES.items() if bool(case.steady) != bool(case.why)] == []


@pytest.mark.parametrize("names", [*itertools.combinations(MAIN_JOB, 2), MAIN_JOB], ids="+".join)
def test_the_main_job_waits_for_no_more_than_its_techniques(names, tmp_path, capsys):
    cases = [CASES[name] for name in names]
    budgets = {phase: sum(getattr(case, phase) for case in cases) for phase in PHASES}
    recipe = {key: dict(options) for case in cases for key, options in case.recipe.items()}
    check(Case(recipe, **budgets), "+".join(names), torch.bfloat16, tmp_path, capsys)


@on_pretended_device
def notices(device: PretendedDevice, what: str) -> list[str]:
    x = torch.ones(4, device=CUDA)
    generator = torch.Generator("cuda")
    device.taken()
    {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool((x > 0).all()),
        "mask": lambda: x[x > 0],
        "nonzero": lambda: x.nonzero(),
        "to host": lambda: x.cpu(),
        "to device": lambda: torch.ones(2).to(CUDA),
        "made there": lambda: torch.tensor([1.0], device=CUDA),
        "nothing": lambda: (x.normal_(generator=generator).add_(torch.tensor(2.0)), torch.zeros(3, device=CUDA)),
        "tensors": lambda: x + torch.ones(4),
        "number in a list": lambda: torch.stack([x[0], torch.tensor(1.0)]),
        "data": lambda: setattr(x, "data", torch.ones(4)),
        "generator": lambda: torch.rand(2, generator=generator),
    }[what]()
    return [kind for (kind, place), count in device.taken().items() for _ in range(count)]


@pytest.mark.parametrize("what", ["item", "bool", "mask", "nonzero", "to host", "to device", "made there"])
def test_the_device_counts_what_waits(what):
    assert len(notices(what)) == 1
    assert notices("nothing") == []


@pytest.mark.parametrize("what", ["tensors", "number in a list", "data", "generator"])
def test_the_device_refuses_what_is_elsewhere(what):
    with pytest.raises(AssertionError, match="MixedDevicesError"):
        notices(what)


@on_pretended_device
def told_of_tf32(device: PretendedDevice) -> str:
    run = Run(device, CASES["matmul"].recipe, None, Path())
    run.begin()
    return run.session.techniques["matmul"].report()["reason"]


def test_a_gpu_that_measures_as_without_tf32_is_not_said_to_lack_it():
    assert "NVIDIA_TF32_OVERRIDE" in told_of_tf32()


@on_pretended_device
def tables(device: PretendedDevice) -> tuple[int, bool]:
    """Return how many copies a table takes that was made before, and whether that of a captured graph is kept."""
    weights = [torch.ones(16, device=CUDA)]
    assert len(list(launch.tensor_tables(1024, weights))) == 1
    device.launches.clear()
    torch.cuda.is_current_stream_capturing = lambda: True
    (made,) = launch.tensor_tables(1024, weights)
    launches, kept = device.launches.total(), weakref.ref(made.table)
    del made
    launch._tables.cache_clear()
    gc.collect()
    return launches, kept() is not None


def test_a_table_of_tensors_is_made_once_and_kept_for_a_captured_graph():
    assert tables() == (0, True)


@on_pretended_device
def counted(device: PretendedDevice) -> tuple[Any, ...]:
    means = MicroBatchMeans("hf")
    counts = torch.tensor([[3, 3], [3, 5], [2, 2]], device=CUDA)
    total = torch.ones((), device=CUDA)
    device.taken()
    for step in counts:
        for count in step:
            means.open()
            means.normalize(total, count)
        assert means.close() == ""
    return device.taken().total(), means.differing(), means.differing()


def test_counts_are_compared_on_their_device_and_told_when_figures_are():
    waits, told, again = counted()
    assert (waits, again) == (0, "")
    assert "have 3 to 5 positions" in told


@on_pretended_device
def masks_here_and_there(device: PretendedDevice, ties: bool) -> int:
    """Compare masks of the device with those of the CPU; return how often the host waited for them."""
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(9, 7, generator=generator), torch.randn(33, generator=generator), torch.ones(0)]
    scores = [(score * 2).round() for score in scores] if ties else scores
    live, gradient = scores[0] > 0, torch.randn(9, 7, generator=generator)
    there = [score.to(CUDA) for score in scores]
    others = [tensor.to(CUDA) for tensor in (live, gradient)]
    waits = 0
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        device.taken()
        with checked_together():
            found = (
                prune_masks(there, share),
                rigl_mask(there[0], others[1], others[0], share, num_live=int(live.sum())),
            )
        waits = max(waits, device.taken().total())
        wanted = prune_masks(scores, share), rigl_mask(scores[0], gradient, live, share)
        assert all(mask.cpu().equal(same) for mask, same in zip(found[0], wanted[0], strict=True))
        assert found[1].cpu().equal(wanted[1])
    with pytest.raises(ConfigError, match="not be NaN, got one in tensor 1"), checked_together():
        prune_masks([there[0], there[1] * torch.nan], 0.5)
    return waits


@pytest.mark.parametrize("ties", [False, True])
def test_masks_are_those_of_the_cpu_with_one_wait_for_all_tensors(ties):
    # one for the limits of layers, two more where a layer reaches its own, one for NaN
    assert masks_here_and_there(ties) <= 4


@on_pretended_device
def distilled_from_hidden(device: PretendedDevice, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], int]:
    """Return loss and gradients in a type and in float64, and how many products of a chunk were added to the sum."""
    generator = torch.Generator().manual_seed(0)
    shapes = (131, 12), (29, 12), (131, 16), (29, 16)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    labels, found = torch.randint(29, (131,), generator=generator), []
    for place, kind in ((CUDA, dtype), (torch.device("cpu"), torch.float64)):
        hidden, weight, *teacher = (value.to(place, kind) for value in values)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        loss = chunked_kd_loss(*leaves, *teacher, labels=labels.to(place), alpha=0.3, chunk_rows=28)
        found.append([part.cpu() for part in (loss.detach(), *torch.autograd.grad(3 * loss, leaves))])
    return *found, device.launches["aten::addmm"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_distillation_sums_half_products_in_float32_by_the_product(dtype):
    found, wanted, added = distilled_from_hidden(dtype)
    assert added >= 4
    assert [part.dtype for part in found] == [torch.float32, dtype, dtype]
    for ours, exact in zip(found, wanted, strict=True):
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3)


if __name__ == "__main__":
    write_table()
