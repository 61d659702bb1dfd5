"""Reading a cache: the targets of a batch, found by what its examples are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared_core.distillation.teacher_cache.format import Index, Manifest, Shard, index_name, shard_name
from shared_core.distillation.teacher_cache.keys import ExampleRows, example_rows, tensors_of
from shared_core.distillation.teacher_cache.writer import CachedTargets, normalised
from shared_core.errors import CheckpointError

_OPEN_SHARDS = 512  # mappings are limited, 65,530 a process on Linux


class TeacherCache:
    """A store of a teacher's outputs, opened for reading.

    It is mapped, not read: memory grows with what is looked up, and the system takes it back when it needs it. It never
    writes, so threads, forked or spawned workers and several processes may share it; pickled it is its path.

    Args:
        path: The folder that `write_teacher_cache` or ``eff cache-teacher`` wrote.

    Raises:
        CheckpointError: If it is missing, damaged, or its writing was interrupted.

    Example:
        >>> import tempfile
        >>> from shared_core.distillation.teacher_cache.writer import write_teacher_cache
        >>> folder, teacher, inputs = tempfile.mkdtemp(), torch.nn.Linear(4, 3), torch.randn(5, 4)
        >>> _ = write_teacher_cache(teacher, [inputs], folder, temperature=2.0)
        >>> targets = TeacherCache.open(folder).lookup(inputs[[3, 1]])
        >>> tuple(targets.log_probs.shape), targets.mask.tolist()
        ((2, 3), [True, True])
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        """The description of the cache's contents."""
        if not self.manifest.complete:
            raise CheckpointError(
                "cached teacher",
                f"{self.path} must be complete, got one whose writing was interrupted",
                "run the same command again with --resume",
            )
        self._index = Index(self.path / index_name(len(self.manifest.shards)))
        if len(self._index) != self.manifest.examples:
            raise CheckpointError(
                "cached teacher",
                f"{self.path} must have an index of its {self.manifest.examples} examples, got {len(self._index)}",
                "write it again",
            )
        # no lock of our own, which a fork could copy while it is held
        self._shard = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    @classmethod
    def open(cls, path: Path | str) -> TeacherCache:
        """Return the cache in a folder."""
        return cls(path)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.manifest.examples

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self.path),)

    def check(
        self,
        *,
        temperature: float | None = None,
        vocabulary: int | None = None,
        teacher_fingerprint: str | None = None,
        tokenizer_fingerprint: str | None = None,
        template_fingerprint: str | None = None,
        data_fingerprint: str | None = None,
    ) -> tuple[str, ...]:
        """Refuse a store that was made with something else; None is not compared.

        Args:
            temperature: ``T`` of the loss.
            vocabulary: The student's number of classes.
            teacher_fingerprint: Of the teacher or of its folder: `teacher_fingerprint`, `folder_fingerprint`.
            tokenizer_fingerprint: What `tokenizer_fingerprint` returns.
            template_fingerprint: What `template_fingerprint` returns.
            data_fingerprint: ``manifest.fingerprints["data"]`` of the store that is meant.

        Returns:
            Names of what was given here but not when the store was written, so that nothing could be compared.

        Raises:
            CheckpointError: If one differs, with both values.
        """
        made = self.manifest
        if temperature is not None and temperature != made.temperature:
            raise CheckpointError(
                "cached teacher",
                f"temperature must be the {made.temperature:g} that {self.path} was written at, got {temperature:g}",
                "log-probabilities of the top k at one T do not give those at another: set distill.temperature, or "
                "write the cache again",
            )
        if vocabulary is not None and vocabulary != made.vocabulary:
            raise CheckpointError(
                "cached teacher",
                f"the student must have the {made.vocabulary} classes of {self.path}, got {vocabulary}",
                "both must share labels or vocabulary; one that is only padded can be cut when the cache is written",
            )
        unknown = []
        for name, value in (
            ("teacher", teacher_fingerprint),
            ("tokenizer", tokenizer_fingerprint),
            ("template", template_fingerprint),
            ("data", data_fingerprint),
        ):
            known = [made.fingerprints[name]] + ([made.fingerprints["teacher_files"]] if name == "teacher" else [])
            if value is None:
                continue
            if not any(known):
                unknown.append(name)
            elif value not in known:
                raise CheckpointError(
                    "cached teacher",
                    f"{name} must be the one that {self.path} was written with, got another (fingerprint {value}, not "
                    f"{' or '.join(filter(None, known))})",
                    "write the cache again",
                )
        return tuple(unknown)

    def missing(self, inputs: Any) -> Tensor:
        """Return which examples of a batch are not in the store, ``(B,)`` bool; arguments as of `lookup`."""
        found = self._index.find(example_rows(inputs, self.manifest.fields).keys)
        return torch.tensor([place is None for place in found], dtype=torch.bool)

    def lookup(self, inputs: Any) -> CachedTargets:
        """Return the targets of a batch, in its order and its padding.

        Args:
            inputs: What the student is given: a mapping, tuple or tensor with the fields that the store was written
                with, examples first, on any device. What else it holds is ignored.

        Returns:
            Targets of shape ``(B, L)`` with the length ``L`` of the batch, or ``(B,)`` for one output an example, on
            the inputs' device.

        Raises:
            CheckpointError: If an example is not there, telling how many, or the file is damaged.
        """
        rows = example_rows(inputs, self.manifest.fields)
        places = self._index.find(rows.keys)
        lacking = [number for number, place in enumerate(places) if place is None]
        if lacking:
            raise CheckpointError(
                "cached teacher",
                f"every example of a batch must be in {self.path}, {len(lacking)} of {len(places)} are not (the first "
                f"is number {lacking[0]})",
                "the data set, the tokenizer or the template changed, or inputs are drawn at random: write the cache "
                "of what the model is given now",
            )
        device = next(iter(tensors_of(inputs).values())).device
        return self._gather(rows, [place for place in places if place is not None], device)

    def _gather(self, rows: ExampleRows, places: list[tuple[int, int]], device: torch.device) -> CachedTargets:
        made = self.manifest
        shards = [self._shard(number) for number, _ in places]
        lengths = [shard.length_of(row) for shard, (_, row) in zip(shards, places, strict=True)]
        length, offsets = self._layout(rows, lengths)
        # Pinned memory lets the copies to a GPU run beside the forward.
        shape, pin = (len(places), length), device.type == "cuda"
        is_dense = made.top_k == made.vocabulary
        log_probs = torch.zeros(*shape, made.top_k, dtype=made.torch_dtype, pin_memory=pin)
        # A dense store keeps all classes in their order, and so no numbers of classes.
        indices = torch.zeros(*shape, 1 if is_dense else made.top_k, dtype=torch.int32, pin_memory=pin)
        tail = torch.zeros(shape, dtype=torch.float32, pin_memory=pin)
        mask = torch.zeros(shape, dtype=torch.bool, pin_memory=pin)
        for number, (shard, (_, row)) in enumerate(zip(shards, places, strict=True)):
            # Stored positions count from an example's first; `offsets` is where this batch's padding puts that.
            stored, at = shard.rows_of(row), shard.places_of(row) + offsets[number]
            log_probs.numpy()[number, at] = shard.log_probs[stored]
            tail.numpy()[number, at] = shard.tail[stored]
            mask.numpy()[number, at] = True
            classes = shard.indices_of(row)
            if classes is not None:
                indices.numpy()[number, at] = classes
        # narrow dtypes cross to the device, wide ones are made there
        there = [value.to(device, non_blocking=pin) for value in (indices, log_probs, tail, mask)]
        targets = _widened(*there, classes=made.top_k if is_dense else None)
        if made.per_example:
            return CachedTargets(*(value[:, 0] for value in targets))
        return targets

    def _layout(self, rows: ExampleRows, lengths: list[int]) -> tuple[int, npt.NDArray[np.int64]]:
        """Return the number of positions of the batch and where each example begins."""
        field = self.manifest.positions
        if field is not None:
            padding = rows.paddings[field]
            if (padding.stops - padding.starts).tolist() != lengths:
                raise CheckpointError(
                    "cached teacher", f"{self.path} must hold examples as long as its keys say", "it is damaged"
                )
            return padding.length, padding.starts
        if len(set(lengths)) > 1:
            raise CheckpointError(
                "cached teacher",
                f"examples of a batch must have outputs of one length, got {sorted(set(lengths))}",
                f"{self.path} was written from batches that were padded otherwise: batch alike",
            )
        return lengths[0] if lengths else 0, np.zeros(len(lengths), dtype=np.int64)

    def _open_shard(self, number: int) -> Shard:
        made = self.manifest
        if not 0 <= number < len(made.shards):
            raise CheckpointError("cached teacher", f"{self.path} must have shard {number}", "its index is damaged")
        shard = Shard(
            self.path / shard_name(number), vocabulary=made.vocabulary, top_k=made.top_k, dtype=made.torch_dtype
        )
        if len(shard) != made.shards[number]:
            raise CheckpointError(
                "cached teacher",
                f"{shard.path} must hold {made.shards[number]} examples, got {len(shard)}",
                "write it again",
            )
        return shard


def _widened(indices: Tensor, log_probs: Tensor, tail: Tensor, mask: Tensor, *, classes: int | None) -> CachedTargets:
    if classes is not None:
        indices = torch.arange(classes, device=indices.device).expand(*tail.shape, -1)
    exact = log_probs.dtype == torch.float32
    log_probs = log_probs.float()
    # float16 rounds each log-probability; positions without a row hold zeros and must not be rescaled.
    if not exact:
        balanced, tails = normalised(log_probs, tail)
        log_probs = torch.where(mask.unsqueeze(-1), balanced, log_probs)
        tail = torch.where(mask, tails, tail)
    return CachedTargets(indices.long(), log_probs, tail, mask)
