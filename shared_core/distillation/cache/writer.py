"""Writing a cache: a teacher run once over a data set, its outputs kept in shards that a killed writer goes on from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from torch import nn

from shared_core.distillation.batch import is_causal
from shared_core.distillation.cache.fingerprints import teacher_fingerprint
from shared_core.distillation.cache.manifest import DTYPES, FINGERPRINTS, Manifest
from shared_core.distillation.cache.store_writer import Settings, StoreWriter
from shared_core.distillation.softened_pair import check_temperature
from shared_core.errors import CheckpointError, ConfigError
from shared_core.journal_file import exclusive


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
    labelled: bool = False,
    causal: bool | None = None,
    logits: str = "logits",
    fingerprints: Mapping[str, str | None] | None = None,
    shard_bytes: int = 2**27,
    progress: Callable[[int, int | None], None] | None = None,
    resume: bool = False,
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
        labelled: Store only positions whose label is not -100; the batches must have ``labels`` then.
        causal: With `labelled`, whether position i predicts label i + 1; None: told by the teacher's class.
        logits: Key or attribute of the logits in what the teacher returns.
        fingerprints: Of ``tokenizer``, ``template`` and ``teacher_files``, as the functions of those names return.
        shard_bytes: Size from which a shard is written; about three times that is held in memory.
        progress: Called with the number of batches done and of all, None if unknown.
        resume: Go on in a folder that was written with the same settings, or add examples to it.

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
    _check(temperature, top_k, dtype, fields, vocabulary, shard_bytes, fingerprints)
    told = {name: (fingerprints or {}).get(name) for name in FINGERPRINTS}
    settings = Settings(
        float(temperature),
        top_k,
        dtype,
        None if fields is None else tuple(fields),
        vocabulary,
        labelled,
        is_causal(teacher) if causal is None else causal,
        logits,
        {**told, "teacher": told["teacher"] or teacher_fingerprint(teacher), "data": None},
    )
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"cached teacher: {folder} must be a new or empty folder, got one that holds something; choose another "
            "one, or go on in it with resume"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cached teacher: {folder} must be writable, got {error}") from error
    total = len(batches) if isinstance(batches, Sized) else None
    was_training = teacher.training
    try:
        with _alone(folder):
            writer = StoreWriter(teacher, folder, settings, shard_bytes)
            for number, batch in enumerate(batches, 1):
                writer.add(batch, number)
                if progress is not None:
                    progress(number, total)
            return writer.finish()
    finally:
        teacher.train(was_training)


def _alone(folder: Path) -> contextlib.AbstractContextManager[int]:
    """Keep other writers out of the folder; the lock goes with the process, killed or not."""
    return exclusive(
        os.open(folder, os.O_RDONLY),
        f"cached teacher: {folder} must be free, but another process writes it; wait for it, or stop it",
    )


def _check(
    temperature: float,
    top_k: int | None,
    dtype: str,
    fields: Sequence[str] | None,
    vocabulary: int | None,
    shard_bytes: int,
    fingerprints: Mapping[str, str | None] | None,
) -> None:
    check_temperature("cached teacher", temperature)
    for name, value, low in (("top_k", top_k, 1), ("vocabulary", vocabulary, 2), ("shard_bytes", shard_bytes, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise ConfigError(f"cached teacher: {name} must be a whole number from {low}, got {value!r}")
    if dtype not in DTYPES:
        raise ConfigError(f"cached teacher: dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    if fields is not None and (isinstance(fields, str) or not fields or len(set(fields)) != len(fields)):
        raise ConfigError(f"cached teacher: fields must be a list of different names, got {fields!r}")
    unknown = sorted(set(fingerprints or {}) - set(FINGERPRINTS))
    if unknown:
        raise ConfigError(f"cached teacher: fingerprints must be of {', '.join(FINGERPRINTS)}, got {unknown[0]!r}")
