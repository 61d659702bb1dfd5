"""The inside of writing a cache: which examples are new, what is kept of them, when a shard is finished."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.atomic import clean_strays
from shared_core.distillation.batch import Forward, ask_teacher, find_logits
from shared_core.distillation.cache.keys import ExampleRows, Padding, as_keys, default_fields, example_rows
from shared_core.distillation.cache.manifest import MANIFEST_FILE, Manifest
from shared_core.distillation.cache.shards import (
    Array,
    Index,
    PendingShard,
    Shard,
    index_name,
    indices_dtype,
    shard_name,
    write_index,
)
from shared_core.distillation.cache.targets import to_stored, top_k_targets
from shared_core.distillation.unlabelled import IGNORED
from shared_core.errors import CheckpointError, ConfigError
from shared_core.model_calls import naming

TOP_K = 64
"""Classes kept of a position where nothing else is said; of an example's only output all are."""


class Settings(NamedTuple):
    """What was asked of a store; the options of `write_teacher_cache`."""

    temperature: float
    top_k: int | None
    dtype: str
    fields: tuple[str, ...] | None
    vocabulary: int | None
    labelled: bool
    causal: bool
    logits: str
    fingerprints: dict[str, str | None]


class StoreWriter:
    """Keeps what a teacher says about new examples, a shard at a time.

    Args:
        teacher: The model.
        folder: Where to write; a store that is there is gone on with.
        settings: What was asked.
        shard_bytes: Size from which a shard is written.

    Raises:
        CheckpointError: If the folder holds something else, or a store with other settings.
    """

    def __init__(self, teacher: nn.Module, folder: Path, settings: Settings, shard_bytes: int) -> None:
        self._teacher, self._folder, self._settings, self._shard_bytes = teacher, folder, settings, shard_bytes
        self._accepted = _keywords(teacher)
        self._pending = PendingShard()
        self._known: dict[bytes, int] = {}
        """Every example's key with a hash of which of its positions count."""
        self._manifest: Manifest | None = None
        self._shards = 0
        clean_strays(folder)
        if (folder / MANIFEST_FILE).exists():
            self._go_on(Manifest.read(folder))
        elif any(folder.iterdir()):
            raise CheckpointError(f"cached teacher: {folder} must hold a cache or nothing, got something else")

    def add(self, batch: Any, number: int) -> None:
        """Run the teacher on a batch with an example that is new, and keep what is new."""
        fields = self._fields(batch)
        rows = example_rows(batch, fields)
        counted = self._labelled_positions(batch) if self._settings.labelled else None
        fresh = self._fresh(rows, counted, number)
        if not fresh:
            return
        output = self._ask(batch, number)
        logits = find_logits(output, self._settings.logits, "teacher")
        made = self._settle(rows, fields, logits, number)
        self._keep(made, rows, fresh, logits, counted)
        if self._pending.size >= self._shard_bytes:
            self._flush()

    def finish(self) -> Manifest:
        """Write the last shard, the index, and the manifest that says that all is there."""
        self._flush()
        made = self._manifest
        if made is None or not self._shards:
            raise ConfigError("cached teacher: batches must hold at least one example, got none; check the data")
        if made.complete and len(made.shards) == self._shards:
            return made
        shards = [self._open(made, number) for number in range(self._shards)]
        index = self._folder / index_name(self._shards)
        write_index(index, shards)
        rows, mass, largest = 0, 0.0, 0.0
        for shard in shards:
            masses = np.exp(shard.tail.astype(np.float64))
            rows, mass, largest = rows + len(masses), mass + masses.sum(), max(largest, masses.max(initial=0.0))
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
            ("labelled", made.labelled, asked.labelled),
            ("fields", made.fields, made.fields if asked.fields is None else asked.fields),
            ("top_k", made.top_k, _kept(asked.top_k, made.vocabulary, per_example=made.per_example)),
            ("vocabulary", made.vocabulary, made.vocabulary if asked.vocabulary is None else asked.vocabulary),
        ]
        for name in ("teacher", "teacher_files", "tokenizer", "template"):
            given.append((name, made.fingerprints[name], asked.fingerprints[name]))
        for name, there, here in given:
            if there != here:
                raise CheckpointError(
                    f"cached teacher: {name} must be as {self._folder} was begun with, {there}, to go on in it, got "
                    f"{here}; use the same, or write another folder"
                )
        self._manifest = made
        while (self._folder / shard_name(self._shards)).exists():
            shard = self._open(made, self._shards)
            places = [shard.places_of(row) for row in range(len(shard))] if made.labelled else [None] * len(shard)
            self._known.update(zip(as_keys(shard.keys), map(_digest, places), strict=True))
            self._shards += 1
        if made.complete and self._shards < len(made.shards):
            raise CheckpointError(
                f"cached teacher: {self._folder} must hold {len(made.shards)} shards, got {self._shards}"
            )

    def _fields(self, batch: Any) -> tuple[str, ...]:
        if self._manifest is not None:
            return self._manifest.fields
        accepted = self._accepted if self._takes_keywords(batch) else None
        return self._settings.fields or default_fields(batch, accepted)

    def _takes_keywords(self, batch: Any) -> bool:
        """Return whether the batch's names are the teacher's arguments; else a mapping is its only argument."""
        return isinstance(batch, Mapping) and (self._accepted is None or not self._accepted.isdisjoint(batch))

    def _call(self, batch: Any) -> Forward:
        if self._takes_keywords(batch):
            # keys and values of every layer, which nobody asks for again, would be the largest tensors of the forward
            no_cache = {"use_cache": False} if "use_cache" in (self._accepted or ()) else {}
            return Forward((), {**batch, **no_cache}, None)
        return Forward(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, None)

    def _ask(self, batch: Any, number: int) -> Any:
        with naming(batch, f"cached teacher: batch {number}", "return others from the function of the data"):
            return ask_teacher(self._teacher.eval(), self._teacher, self._call(batch))

    def _labelled_positions(self, batch: Any) -> Array:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2:
            raise ConfigError(
                "cached teacher: batches must hold labels of shape (examples, positions) to store only positions that "
                "have one, got none; let the collator add them"
            )
        counted: Array = (labels != IGNORED).cpu().numpy()
        if self._settings.causal:
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
                fresh.append(row)
            elif self._known[key] != mark:
                raise ConfigError(
                    f"cached teacher: examples with the same inputs must have labels at the same positions, got number "
                    f"{row} of batch {number} with others; store all positions (labelled=False)"
                )
        return fresh

    def _settle(self, rows: ExampleRows, fields: tuple[str, ...], logits: Tensor, number: int) -> Manifest:
        """Return what the folder holds: from the first batch, and the same at every other."""
        asked, classes = self._settings, logits.shape[-1]
        if logits.ndim not in (2, 3) or classes < 2 or len(logits) != len(rows.keys):
            raise ConfigError(
                f"cached teacher: logits must have shape ({len(rows.keys)}, classes) or ({len(rows.keys)}, positions, "
                f"classes) with two classes at least, got {tuple(logits.shape)} in batch {number}"
            )
        vocabulary = classes if asked.vocabulary is None else asked.vocabulary
        if vocabulary > classes:
            raise ConfigError(
                f"cached teacher: vocabulary must be at most the teacher's {classes} classes, got {vocabulary}"
            )
        per_example = logits.ndim == 2
        made = self._manifest
        if made is None:
            made = self._manifest = Manifest(
                temperature=asked.temperature,
                top_k=_kept(asked.top_k, vocabulary, per_example=per_example),
                vocabulary=vocabulary,
                dtype=asked.dtype,
                fields=fields,
                per_example=per_example,
                positions=None if per_example else _position_field(rows, logits.shape[1]),
                labelled=asked.labelled,
                fingerprints=asked.fingerprints,
            )
            made.write(self._folder)
        if (made.vocabulary, made.per_example) != (vocabulary, per_example):
            raise ConfigError(
                f"cached teacher: logits must have {made.vocabulary} classes and "
                f"{'no positions' if made.per_example else 'positions'} as those before, got shape "
                f"{tuple(logits.shape)} in batch {number}"
            )
        if made.positions is not None and rows.paddings[made.positions].length != logits.shape[1]:
            raise ConfigError(
                f"cached teacher: logits must have a position for each of {made.positions}'s "
                f"{rows.paddings[made.positions].length}, got shape {tuple(logits.shape)} in batch {number}"
            )
        return made

    def _keep(self, made: Manifest, rows: ExampleRows, fresh: list[int], logits: Tensor, counted: Array | None) -> None:
        logits = logits[..., : made.vocabulary]
        if made.per_example:
            where, lengths = [np.zeros(1, np.int64)] * len(fresh), [1] * len(fresh)
            chosen = [logits[torch.tensor(fresh, device=logits.device)]]
        else:
            whole = Padding.whole(len(rows.keys), logits.shape[1])
            padding = rows.paddings.get(str(made.positions), whole)
            if counted is not None and counted.shape != padding.real.shape:
                raise ConfigError(
                    f"cached teacher: labels must have the shape of the teacher's positions, {padding.real.shape}, got "
                    f"{counted.shape}"
                )
            where = [_places(padding, counted, row) for row in fresh]
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
        if self._pending.keys:
            self._pending.write(self._folder / shard_name(self._shards))
            self._shards += 1
            self._pending = PendingShard()

    def _open(self, made: Manifest, number: int) -> Shard:
        return Shard(
            self._folder / shard_name(number), vocabulary=made.vocabulary, top_k=made.top_k, dtype=made.torch_dtype
        )


def _kept(top_k: int | None, vocabulary: int, *, per_example: bool) -> int:
    if top_k is None:
        top_k = vocabulary if per_example else TOP_K
    return min(top_k, vocabulary)


def _position_field(rows: ExampleRows, length: int) -> str | None:
    """Return the field whose positions outputs of this length follow; a decoder's come before an encoder's."""
    names = sorted(rows.paddings, key=lambda name: not name.startswith("decoder_"))
    return next((name for name in names if rows.paddings[name].length == length), None)


def _places(padding: Padding, counted: Array | None, row: int) -> Array:
    """Return an example's positions to store, counted from its first."""
    real = padding.real[row] if counted is None else padding.real[row] & counted[row]
    places: Array = np.flatnonzero(real) - padding.starts[row]
    return places


def _digest(places: Array | None) -> int:
    if places is None:
        return 0
    return int.from_bytes(hashlib.blake2b(places.astype(np.int64).tobytes(), digest_size=8).digest(), "big")


def _keywords(module: nn.Module) -> set[str] | None:
    """Return the keywords that forward takes, None for any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
