"""A teacher from a folder or the Hub: the class its config names, every weight found in its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from shared_core.distillation.cache.fingerprints import tokenizer_vocabulary
from shared_core.errors import CheckpointError, ConfigError
from shared_core.plain_checkpoint import check_values
from shared_core.same_class_teacher import is_bare_weights, teacher_from_weights


def load_teacher(name: str, student: nn.Module) -> nn.Module:
    """Return the model saved under `name`, on the student's device; random numbers are left as they were.

    Args:
        name: A folder that a trainer or ``save_pretrained`` wrote, or a name on the Hub; a folder without config.json
            or a ``.safetensors`` file holds an earlier state of the student.
        student: Gives the device, and the class where the config names none.

    Raises:
        CheckpointError: If it cannot be found or read, or its files lack a weight.
    """
    if is_bare_weights(Path(name).expanduser()):
        return teacher_from_weights(Path(name).expanduser(), student)
    _check_path(name)
    device = next((parameter.device for parameter in student.parameters()), torch.device("cpu"))
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            teacher, loading = _class_of(config, student, name).from_pretrained(
                name, config=config, output_loading_info=True
            )
        except CheckpointError:
            raise
        except Exception as error:  # transformers, safetensors and the Hub client each raise their own
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"distill: teacher must be a readable model folder or Hub name, got {name!r}: {first_line[:300]}"
            ) from error
    lacking = [*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])]
    if lacking:
        raise CheckpointError(
            f"distill: teacher's files must hold every weight, got {name!r} without {sorted(lacking)[0]} "
            f"({len(lacking)} in all); it would teach from random weights"
        )
    check_values(teacher, dict(teacher.named_parameters()), f"distill: teacher {name!r}")
    return teacher.to(device)  # type: ignore[no-any-return]


def empty_model(name: str) -> nn.Module:
    """Return the model that a folder's config describes, in the type of its weights, on the meta device.

    Raises:
        CheckpointError: If the config cannot be read, or names no class of transformers.
    """
    _check_path(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # else a terminal is asked
    except Exception as error:  # transformers and the Hub client each raise their own
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"distill: teacher must have a readable config.json, got {name!r}: {first_line[:300]}"
        ) from error
    with torch.device("meta"):
        model: nn.Module = _class_of(config, nn.Module(), name)._from_config(config)
    return model.to(config.dtype) if isinstance(config.dtype, torch.dtype) else model


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Refuse a teacher whose folder tells that its token numbers mean other tokens than the student's.

    A vocabulary may lack tokens of the other, and a hundredth may be renamed, as reserved ones are.

    Args:
        name: As of `load_teacher`; where it is no folder with a ``tokenizer.json``, nothing is compared.
        tokenizer: The student's, or the processor that holds it; None where the trainer has none.

    Raises:
        ConfigError: With an example.
    """
    ours, theirs = tokenizer_vocabulary(tokenizer), tokenizer_vocabulary(Path(name).expanduser())
    if not ours or not theirs:
        return
    meant = {number: token for token, number in theirs.items()}
    shared = [(number, token, meant[number]) for token, number in ours.items() if number in meant]
    others = sorted((number, mine, other) for number, mine, other in shared if mine != other)
    if len(others) > len(shared) / 100:
        number, mine, other = others[0]
        raise ConfigError(
            f"distill: teacher must have the student's tokenizer, got one in {name!r} where {len(others)} of "
            f"{len(shared)} numbers mean other tokens, such as {number}: {mine!r} and {other!r}; take a teacher of the "
            "student's tokenizer, or train on text that this one generates"
        )


def _check_path(name: str) -> None:
    path = Path(name).expanduser()
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or os.sep == "\\" in name
    if path.exists():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"distill: teacher must be a folder with config.json, got {name!r} without; give the folder that "
                "save_model or save_pretrained wrote"
            )
    elif looks_like_path:
        raise CheckpointError(f"distill: teacher must be an existing folder or a Hub name, got {name!r}")


def _class_of(config: Any, student: nn.Module, name: str) -> Any:
    known = [getattr(transformers, found, None) for found in config.architectures or ()]
    if known and known[0] is not None:
        return known[0]
    # a model class of the user's own is not an attribute of transformers
    kind = type(student)
    if hasattr(kind, "from_pretrained") and kind.__name__ in (config.architectures or [kind.__name__]):
        return kind
    raise CheckpointError(
        f"distill: teacher's config must name a class of transformers, got {config.architectures!r} in {name!r}; "
        "load it yourself and pass the object"
    )
