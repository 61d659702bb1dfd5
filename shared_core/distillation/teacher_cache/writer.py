"""Write a cache: run a teacher once over a data set and keep its outputs in shards; a killed writer can go on.

Of the logits, the k most probable classes at one temperature are kept, and the probability mass of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.distillation.forward_capture import Forward, ask_teacher, is_causal, keywords_of
from shared_core.distillation.losses.softened_pair import check_temperature, compute_dtype
from shared_core.distillation.outputs import find_logits
from shared_core.distillation.teacher_cache.format import (
    DTYPES,
    FINGERPRINTS,
    MANIFEST_FILE,
    Array,
    Index,
    Manifest,
    PendingShard,
    Shard,
    index_name,
    indices_dtype,
    shard_name,
    write_index,
)
from shared_core.distillation.teacher_cache.keys import (
    WHERE,
    ExampleRows,
    Padding,
    as_keys,
    default_fields,
    example_rows,
    teacher_fingerprint,
)
from shared_core.distillation.unlabeled import IGNORED
from shared_core.distributed.job import Job
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.files.atomic import clean_strays
from shared_core.files.journal import exclusive
from shared_core.modules.calls import cache_configs, naming, without_cache

_CHUNK_ELEMENTS = 2**24


class TopK(NamedTuple):
    """The k most probable classes of each row, most probable first, and the log-mass of all the others."""

    indices: Tensor
    log_probs: Tensor
    tail_log_mass: Tensor


def top_k_targets(logits: Tensor, *, temperature: float, top_k: int) -> TopK:
    r"""Return the k most probable classes of :math:`softmax(z / T)` and the log-mass of the others.

    .. math:: \log p_i = z_i / T - \log \sum_j e^{z_j / T}, \quad tail = \log \sum_{i > k} p_i

    The tail is summed over its own classes, not taken as what the top k leave to 1, so a small one keeps its digits.
    With ``k = C`` the classes stay in their order and the tail is -inf.

    Args:
        logits: ``(rows, C)``, any float dtype.
        temperature: ``T``, finite and > 0. The arithmetic is float32, float64 for T > 10 or < 0.01.
        top_k: Classes to keep, 1..C.

    Returns:
        int64 ``(rows, k)``, float32 ``(rows, k)`` and float32 ``(rows,)``, on the logits' device.

    Raises:
        ConfigError: If an argument is not as above.
        TrainingError: If a row is no distribution: NaN, +inf, or -inf everywhere.

    Source: Hinton et al., 2015, arXiv:1503.02531, for T; Anshumann et al., 2025, arXiv:2503.16870, for why the tail
    must stay.

    Example:
        >>> top = top_k_targets(torch.tensor([[0.0, 2.0, 1.0]]), temperature=1.0, top_k=2)
        >>> top.indices.tolist(), [round(p, 3) for p in top.log_probs.exp()[0].tolist()]
        ([[1, 2]], [0.665, 0.245])
        >>> round(top.tail_log_mass.exp().item(), 3)
        0.09
    """
    check_temperature(WHERE, temperature)
    if logits.ndim != 2 or not logits.is_floating_point() or not 1 <= top_k <= logits.shape[1]:
        rule = f"{logits.dtype} {tuple(logits.shape)} and top_k {top_k}"
        raise ConfigError(WHERE, f"logits must be floats (rows, classes), and top_k in 1 to classes, got {rule}")
    rows, classes = logits.shape
    chunk = max(1, _CHUNK_ELEMENTS // classes)  # copies of (rows, C) in float32 would outgrow the logits themselves
    parts = [_top_k(logits[at : at + chunk], temperature, top_k) for at in range(0, max(rows, 1), chunk)]
    return TopK(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _top_k(logits: Tensor, temperature: float, top_k: int) -> TopK:
    log_probs = F.log_softmax(logits.to(compute_dtype(logits.dtype, temperature)) / temperature, dim=-1)
    if torch.isnan(log_probs).any():
        rule = "the teacher's logits must be finite or -inf, got NaN or +inf"
        raise TrainingError(WHERE, rule, "run it in float32 or bfloat16")
    if top_k == logits.shape[-1]:
        indices = torch.arange(top_k, device=logits.device).expand(len(logits), -1)
        return TopK(indices, log_probs.float(), log_probs.new_full((len(logits),), -torch.inf).float())
    top, indices = log_probs.topk(top_k, dim=-1)
    # The tail's log-mass from the tail's own classes: 1 - Σ p of the top would lose all digits below 1e-7.
    tail = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1)
    return TopK(indices, top.float(), tail.float())


def to_stored(log_probs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log-probabilities in the dtype they are stored in; what is too small for float16 becomes its smallest."""
    # The error of float16 is at most 2^-11 |log p|: of a probability p, relative to it, the same. A class that is
    # merely improbable must not become impossible (-inf), and an impossible one must stay so.
    low = torch.finfo(dtype).min
    return torch.where(torch.isneginf(log_probs), log_probs, log_probs.clamp(min=low)).to(dtype)


TOP_K = 64
"""Classes kept of a position where nothing else is said; of an example's only output all are."""


class Settings(NamedTuple):
    """The options of `write_teacher_cache`."""

    temperature: float
    top_k: int | None
    dtype: str
    fields: tuple[str, ...] | None
    vocabulary: int | None
    labeled: bool
    causal: bool
    logits: str
    fingerprints: dict[str, str | None]


class StoreWriter:
    """Keeps what a teacher says about new examples, a shard at a time; a store that is there is gone on with.

    Of several processes (`job`) each goes through all batches, so that it knows which examples each shard will hold,
    and runs the teacher for those shards alone that are its own.
    """

    def __init__(
        self, teacher: nn.Module, folder: Path, settings: Settings, shard_bytes: int, job: Job | None = None
    ) -> None:
        self._teacher, self._folder, self._settings, self._shard_bytes = teacher, folder, settings, shard_bytes
        self._job = job or Job()
        self._accepted = keywords_of(teacher)
        self._caches = cache_configs(teacher)
        self._pending = PendingShard()
        self._order = hashlib.blake2b(digest_size=16)
        """Of all new examples so far, which must be the same for every process."""
        self._known: dict[bytes, int] = {}
        """Every example's key with a hash of which of its positions count."""
        self._manifest: Manifest | None = None
        self._shards = 0
        if self._job.is_main:
            clean_strays(folder)  # that a killed writer left under temporary names
        self._job.meet("folder made")
        if (folder / MANIFEST_FILE).exists():
            self._go_on(Manifest.read(folder))
        elif any(folder.iterdir()):
            raise CheckpointError(WHERE, f"{folder} must be empty or hold a cache, got other files")
        # Nobody writes a shard before all have seen which are there.
        self._job.meet("shards found")
        self._first = self._shards
        self._begin_shard(is_next_mine=True)

    def _begin_shard(self, *, is_next_mine: bool) -> None:
        """Begin the next shard; it is this process's if it has the shard's ticket."""
        if is_next_mine:
            self._mine = self._first + self._job.ticket("shards")
        self._examples, self._size = 0, 0  # of this shard, whoever runs the teacher for it; in bytes
        self._pending, self._there = PendingShard(), None
        path = self._folder / shard_name(self._shards)
        made = self._manifest
        # beyond one that lacks: another process was faster when all were stopped
        if made is not None and self._mine == self._shards and not _is_free(made) and path.exists():
            self._there = Shard(self._folder, made, self._shards)

    def add(self, batch: Any, number: int) -> None:
        """Run the teacher on a batch with an example that is new and this process's, and keep what is new."""
        fields = self._fields(batch)
        rows = example_rows(batch, fields)
        counted = self._labeled_positions(batch) if self._settings.labeled else None
        fresh = self._fresh(rows, counted, number)
        if not fresh:
            return
        made, logits = self._manifest, None
        if made is None:
            # All processes run the first batch: its output tells what a row is, and so how many make a shard.
            logits = self._logits(batch, number)
            made = self._settle(rows, fields, logits, number)
            self._begin_together(made)
        if self._mine == self._shards and not self._is_there(rows, fresh):
            if logits is None:
                self._settle(rows, fields, logits := self._logits(batch, number), number)
            self._keep(made, rows, fresh, logits, counted)
        length = None if logits is None or made.per_example else logits.shape[1]
        places = _all_places(made, rows, fresh, counted, length)
        self._size += made.row_bytes * sum(map(len, places))
        self._examples += len(fresh)
        if self._size >= self._shard_bytes:
            self._flush()

    def _logits(self, batch: Any, number: int) -> Tensor:
        if self._takes_keywords(batch):
            call = Forward((), dict(batch), None)
        else:
            call = Forward(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, None)
        where = naming(batch, f"{WHERE}: batch {number}", "return batches that the teacher accepts")
        with where, without_cache(self._caches):
            output = ask_teacher(self._teacher.eval(), self._teacher, call)
        return find_logits(output, self._settings.logits, "teacher")

    def _begin_together(self, made: Manifest) -> None:
        """Write the manifest before any shard, and see that all processes have the same teacher and first batch."""
        if self._job.size > 1 and _is_free(made):
            raise CompatibilityError(
                WHERE,
                "several processes need a teacher with one output per example, or one per position of an "
                "input, to know how many there are",
                "write the cache in one process",
            )
        if self._job.is_main:
            made.write(self._folder)
        self._compare("first batch", json.dumps(made.to_dict()).encode() + self._order.digest())

    def _compare(self, name: str, mine: bytes) -> None:
        if any(other != mine for other in self._job.exchange(name, mine)):
            rule = f"teacher and data must be the same in every process, but the {name} differs"
            raise TrainingError(WHERE, rule, "seed what is random in the functions that return them")

    def _is_there(self, rows: ExampleRows, fresh: list[int]) -> bool:
        """Return True if these examples lie in a shard that was written before this start."""
        if self._there is None:
            return False
        keys = as_keys(self._there.keys[self._examples : self._examples + len(fresh)])
        self._check_there(keys == [rows.keys[row] for row in fresh])
        return True

    def _check_there(self, is_next: bool) -> None:
        if not is_next:
            rule = f"{self._folder / shard_name(self._shards)} does not hold the next examples of this data"
            raise CheckpointError(WHERE, rule, "remove it, or give the data of the interrupted run")

    def finish(self) -> Manifest:
        """Write the last shard, the index, and the manifest that says that all is there."""
        self._flush()
        made = self._manifest
        if made is None or not self._shards:
            raise ConfigError(WHERE, "batches must hold at least one example, got none", "check the data")
        self._compare("end", self._order.digest())
        if self._job.is_main:
            made = self._completed(made)
        self._job.meet("written")
        return made if self._job.is_main else Manifest.read(self._folder)

    def _completed(self, made: Manifest) -> Manifest:
        if made.complete and len(made.shards) == self._shards:
            return made
        shards = [Shard(self._folder, made, number) for number in range(self._shards)]
        index = self._folder / index_name(self._shards)
        write_index(index, shards)
        rows, mass, largest = 0, 0.0, 0.0
        for shard in shards:
            # Millions of tail masses near 1e-4: float32 would stop growing.
            masses = np.exp(shard.tail.astype(np.float64))
            rows, mass, largest = rows + len(masses), mass + masses.sum(), max(largest, masses.max(initial=0.0))
        # A hash of the sorted keys: the same data in another order is the same data.
        data = hashlib.blake2b(Index(index).words().astype(">u8").tobytes(), digest_size=16).hexdigest()
        made = dataclasses.replace(
            made,
            complete=True,
            shards=tuple(len(shard) for shard in shards),
            rows=rows,
            tail_mass_mean=float(mass / max(rows, 1)),
            tail_mass_max=float(largest),
            fingerprints={**made.fingerprints, "data": data},
        )
        # Last: only a manifest with complete = True says that shards and index are there.
        made.write(self._folder)
        for old in self._folder.glob("index-*.safetensors"):
            if old != index:
                old.unlink()
        return made

    def _go_on(self, made: Manifest) -> None:
        """Compare the settings with those of the folder, and learn what it holds."""
        asked = self._settings
        given = [
            ("temperature", made.temperature, asked.temperature),
            ("dtype", made.dtype, asked.dtype),
            ("labeled", made.labeled, asked.labeled),
            ("fields", made.fields, made.fields if asked.fields is None else asked.fields),
            ("top_k", made.top_k, _kept(asked.top_k, made.vocabulary, per_example=made.per_example)),
            ("vocabulary", made.vocabulary, made.vocabulary if asked.vocabulary is None else asked.vocabulary),
        ]
        for name in ("teacher", "teacher_files", "tokenizer", "template"):
            given.append((name, made.fingerprints[name], asked.fingerprints[name]))
        for name, there, here in given:
            if there != here:
                rule = f"{name} must be {there}, with which {self._folder} was started, got {here}"
                raise CheckpointError(WHERE, rule, "use the same, or write to another folder")
        self._manifest = made
        # A shard is renamed into place when whole, so each that exists counts, also without the index.
        while (self._folder / shard_name(self._shards)).exists():
            shard = Shard(self._folder, made, self._shards)
            places = [shard.places_of(row)[2] if made.labeled else None for row in range(len(shard))]
            self._known.update(zip(as_keys(shard.keys), map(_digest, places), strict=True))
            self._shards += 1
        if made.complete and self._shards < len(made.shards):
            raise CheckpointError(WHERE, f"{self._folder} must hold {len(made.shards)} shards, got {self._shards}")

    def _fields(self, batch: Any) -> tuple[str, ...]:
        if self._manifest is not None:
            return self._manifest.fields
        accepted = self._accepted if self._takes_keywords(batch) else None
        return self._settings.fields or default_fields(batch, accepted)

    def _takes_keywords(self, batch: Any) -> bool:
        """Return True if the batch's names are the teacher's arguments; else a mapping is its only argument."""
        return isinstance(batch, Mapping) and (self._accepted is None or not self._accepted.isdisjoint(batch))

    def _labeled_positions(self, batch: Any) -> Array:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2:
            rule = "labeled needs batches with labels (examples, positions), got none"
            raise ConfigError(WHERE, rule, "let the collator add them")
        counted: Array = (labels != IGNORED).cpu().numpy()
        if self._settings.causal:
            # Position i is where token i + 1 is predicted: the label's mask moves one to the left.
            counted = np.pad(counted[:, 1:], ((0, 0), (0, 1)))
        return counted

    def _fresh(self, rows: ExampleRows, counted: Array | None, number: int) -> list[int]:
        """Return which examples of a batch were never seen, and remember them."""
        field = None if counted is None else _position_field(rows, counted.shape[1])
        fresh = []
        for row, key in enumerate(rows.keys):
            mark = 0
            if counted is not None:
                whole = Padding.whole(*counted.shape)
                mark = _digest(_places(rows.paddings.get(str(field), whole), counted, row))
            if key not in self._known:
                self._known[key] = mark
                self._order.update(key + mark.to_bytes(8, "big"))
                fresh.append(row)
            elif self._known[key] != mark:
                raise ConfigError(
                    WHERE,
                    f"examples with the same inputs must have labels at the same positions, but example {row} of batch "
                    f"{number} differs",
                    "store all positions (labeled=False)",
                )
        return fresh

    def _settle(self, rows: ExampleRows, fields: tuple[str, ...], logits: Tensor, number: int) -> Manifest:
        """Return what the folder holds: from the first batch, and the same at every other."""
        asked, made, per_example = self._settings, self._manifest, logits.ndim == 2
        vocabulary = logits.shape[-1] if asked.vocabulary is None else asked.vocabulary
        if wrong := _misfit(made, rows, logits, vocabulary):
            raise ConfigError(WHERE, f"{wrong} in batch {number}")
        if made is None:
            made = self._manifest = Manifest(
                temperature=asked.temperature,
                top_k=_kept(asked.top_k, vocabulary, per_example=per_example),
                vocabulary=vocabulary,
                dtype=asked.dtype,
                fields=fields,
                per_example=per_example,
                positions=None if per_example else _position_field(rows, logits.shape[1]),
                labeled=asked.labeled,
                fingerprints=asked.fingerprints,
            )
        return made

    def _keep(self, made: Manifest, rows: ExampleRows, fresh: list[int], logits: Tensor, counted: Array | None) -> None:
        logits = logits[..., : made.vocabulary]
        where = _all_places(made, rows, fresh, counted, None if made.per_example else logits.shape[1])
        if made.per_example:
            lengths = [1] * len(fresh)
            chosen = [logits[torch.tensor(fresh, device=logits.device)]]
        else:
            padding = _padding(made, rows, logits.shape[1])
            lengths = [int(padding.stops[row] - padding.starts[row]) for row in fresh]
            # an example at a time: all rows together would be the logits once more
            chosen = [
                logits[row, torch.from_numpy(places + padding.starts[row]).to(logits.device)]
                for row, places in zip(fresh, where, strict=True)
            ]
        tops = [top_k_targets(part, temperature=made.temperature, top_k=made.top_k) for part in chosen]
        kept = {
            "log_probs": torch.cat([to_stored(top.log_probs, made.torch_dtype) for top in tops]).cpu(),
            "tail": torch.cat([top.tail_log_mass for top in tops]).cpu(),
        }
        if made.top_k < made.vocabulary:
            kept["indices"] = torch.cat([top.indices for top in tops]).cpu().to(indices_dtype(made.vocabulary))
        self._pending.add([rows.keys[row] for row in fresh], lengths, where, kept)

    def _flush(self) -> None:
        if not self._examples:
            return
        self._check_there(self._there is None or self._examples == len(self._there))
        if self._pending.keys:
            self._pending.write(self._folder / shard_name(self._shards))
        self._job.check()
        self._shards += 1
        self._begin_shard(is_next_mine=self._mine < self._shards)


def _misfit(made: Manifest | None, rows: ExampleRows, logits: Tensor, vocabulary: int) -> str:
    """Return the rule that a batch's logits break: their own, or that of the batches before."""
    count, classes, shape = len(rows.keys), logits.shape[-1], tuple(logits.shape)
    either = f"({count}, classes) or ({count}, positions, classes)"
    if logits.ndim not in (2, 3) or classes < 2 or len(logits) != count:
        return f"logits must have shape {either}, two classes at least, got {shape}"
    if vocabulary > classes:
        return f"vocabulary must be at most the teacher's {classes} classes, got {vocabulary}"
    if made is not None and (made.vocabulary, made.per_example) != (vocabulary, logits.ndim == 2):
        return f"logits must have {made.vocabulary} classes, and positions if earlier batches had them, got {shape}"
    if made is not None and made.positions and (length := rows.paddings[made.positions].length) != logits.shape[1]:
        return f"logits must have a position for each of {made.positions}'s {length}, got {shape}"
    return ""


def _kept(top_k: int | None, vocabulary: int, *, per_example: bool) -> int:
    if top_k is None:
        top_k = vocabulary if per_example else TOP_K
    return min(top_k, vocabulary)


def _position_field(rows: ExampleRows, length: int) -> str | None:
    """Return the field whose positions outputs of this length follow; a decoder's come before an encoder's."""
    names = sorted(rows.paddings, key=lambda name: not name.startswith("decoder_"))
    return next((name for name in names if rows.paddings[name].length == length), None)


def _is_free(made: Manifest) -> bool:
    """Return True if only the teacher's outputs tell how many rows an example has."""
    return not made.per_example and made.positions is None


def _padding(made: Manifest, rows: ExampleRows, length: int | None) -> Padding:
    """Return where the teacher's outputs of a batch lie; `length` is for those that follow no field's positions."""
    known = rows.paddings.get(str(made.positions))
    return Padding.whole(len(rows.keys), length or 0) if known is None else known


def _all_places(
    made: Manifest, rows: ExampleRows, fresh: list[int], counted: Array | None, length: int | None
) -> list[Array]:
    """Return for each new example the positions that get a row, counted from its first."""
    if made.per_example:
        return [np.zeros(1, np.int64)] * len(fresh)
    padding = _padding(made, rows, length)
    if counted is not None and counted.shape != padding.real.shape:
        rule = f"labels must have the shape of the teacher's positions, {padding.real.shape}, got {counted.shape}"
        raise ConfigError(WHERE, rule)
    return [_places(padding, counted, row) for row in fresh]


def _places(padding: Padding, counted: Array | None, row: int) -> Array:
    """Return an example's positions to store, counted from its first."""
    real = padding.real[row] if counted is None else padding.real[row] & counted[row]
    places: Array = np.flatnonzero(real) - padding.starts[row]
    return places


def _digest(places: Array | None) -> int:
    if places is None:
        return 0
    return int.from_bytes(hashlib.blake2b(places.astype(np.int64).tobytes(), digest_size=8).digest(), "big")


def write_teacher_cache(
    teacher: nn.Module,
    batches: Iterable[Any],
    folder: Path | str,
    *,
    temperature: float = 2.0,
    top_k: int | None = None,
    dtype: str = "float16",
    fields: Sequence[str] | None = None,
    vocabulary: int | None = None,
    labeled: bool = False,
    causal: bool | None = None,
    logits: str = "logits",
    fingerprints: Mapping[str, str | None] | None = None,
    shard_bytes: int = 2**27,
    progress: Callable[[int, int | None], None] | None = None,
    resume: bool = False,
    job: Job | None = None,
) -> Manifest:
    """Run a teacher over a data set, keep its top-k log-probabilities and tail mass, and return what was written.

    Examples that are alike are kept once. Shards are written whole and renamed, at ends of batches; a writer that is
    killed leaves the ones it finished, and `resume` goes on after them. The result has the same bits as that of a
    writer that was not, if the batches come in the same order and padding and the teacher computes the same bits twice
    (same device, libraries and number of threads). In another order it has the same content up to rounding.

    Args:
        teacher: The model; it is run in eval mode, without gradients, on its device.
        batches: Tensors or tuples (positional arguments) or mappings (keywords; ``labels`` are left out).
        folder: Where to write; it must not exist or be empty without `resume`.
        temperature: ``T`` of the loss that will use it, finite and > 0.
        top_k: Classes to keep of each row, at most all; None: 64 of a position's, all of an example's only output.
        dtype: ``float16`` (error at most ``2**-11 * |log p|``) or ``float32``, of the log-probabilities.
        fields: Inputs that tell examples apart; None: all that the teacher is given.
        vocabulary: Let the softmax run over the first so many classes, for vocabularies that are padded differently.
        labeled: Store only positions whose label is not -100; the batches must have ``labels`` then.
        causal: With `labeled`, whether position i predicts label i + 1; None: told by the teacher's class.
        logits: Key or attribute of the logits in what the teacher returns.
        fingerprints: Of ``tokenizer``, ``template`` and ``teacher_files``, as the functions of those names return.
        shard_bytes: Size from which a shard is written; about three times that is held in memory.
        progress: Called with the number of batches done and of all, None if unknown.
        resume: Go on in a folder that was written with the same settings, or add examples to it.
        job: Other processes that call this with the same arguments; each runs the teacher for some of the shards, and
            the files are those of one process. A shard is the smallest share: with few of them processes wait.

    Raises:
        ConfigError: If an argument is not as above, or there is no example.
        CheckpointError: If the folder holds something else, or was written with another teacher or settings.
        TrainingError: If the teacher's outputs are no distributions, or somebody else writes the same folder.

    Example:
        >>> import tempfile, torch
        >>> manifest = write_teacher_cache(nn.Linear(2, 5), [torch.eye(2)], tempfile.mkdtemp(), top_k=3)
        >>> manifest.examples, manifest.rows, manifest.top_k, manifest.tail_mass_max < 0.5
        (2, 2, 3, True)
    """
    folder = Path(folder)
    check_temperature(WHERE, temperature)
    if wrong := _wrong(top_k, dtype, fields, vocabulary, shard_bytes, fingerprints):
        raise ConfigError(WHERE, wrong)
    report = {name: (fingerprints or {}).get(name) for name in FINGERPRINTS}
    settings = Settings(
        float(temperature),
        top_k,
        dtype,
        None if fields is None else tuple(fields),
        vocabulary,
        labeled,
        is_causal(teacher) if causal is None else causal,
        logits,
        {**report, "teacher": report["teacher"] or teacher_fingerprint(teacher), "data": None},
    )
    job = job or Job()
    if job.is_main:
        _make_folder(folder, resume=resume)
    total = len(batches) if isinstance(batches, Sized) else None
    was_training = teacher.training
    try:
        # Keeps other writers out of the folder; the lock goes with the process, killed or not.
        rule = f"{WHERE}: {folder} is in use, because another process writes to it; wait for it, or stop it"
        with exclusive(os.open(folder, os.O_RDONLY), rule) if job.is_main else contextlib.nullcontext():
            writer = StoreWriter(teacher, folder, settings, shard_bytes, job)
            for number, batch in enumerate(batches, 1):
                writer.add(batch, number)
                if progress is not None:
                    progress(number, total)
            return writer.finish()
    finally:
        teacher.train(was_training)


def _make_folder(folder: Path, *, resume: bool) -> None:
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        rule = f"{folder} must be a new or empty folder, got one with files"
        raise CheckpointError(WHERE, rule, "choose another one, or continue it with resume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(WHERE, f"{folder} must be writable, got {error}") from error


def _wrong(
    top_k: int | None,
    dtype: str,
    fields: Sequence[str] | None,
    vocabulary: int | None,
    shard_bytes: int,
    fingerprints: Mapping[str, str | None] | None,
) -> str:
    for name, value, low in (("top_k", top_k, 1), ("vocabulary", vocabulary, 2), ("shard_bytes", shard_bytes, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            return f"{name} must be a whole number from {low}, got {value!r}"
    if dtype not in DTYPES:
        return f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}"
    if fields is not None and (isinstance(fields, str) or not fields or len(set(fields)) != len(fields)):
        return f"fields must be a list of different names, got {fields!r}"
    unknown = sorted(set(fingerprints or {}) - set(FINGERPRINTS))
    return f"fingerprints must be of {', '.join(FINGERPRINTS)}, got {unknown[0]!r}" if unknown else ""
