"""A teacher from a folder or the Hub: the class its config names, every weight found in its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from shared_core.checkpoint_formats.opening import is_bare_weights, teacher_from_weights
from shared_core.checkpoint_formats.plain import check_values
from shared_core.errors import CheckpointError
from shared_core.files.json_yaml import parse_json


def load_teacher(name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model saved under `name`, on the student's device; random numbers are left as they were.

    Args:
        name: A folder that a trainer or ``save_pretrained`` wrote, or a name on the Hub; a folder without config.json
            or a ``.safetensors`` file holds an earlier state of the student.
        student: Gives the device, and the class where the config names none, or where the student is a model of
            sentence-transformers.
        trust_remote_code: Run the code that lies beside the weights (``auto_map`` in ``config.json``).
    """
    composed = _is_composed(student)
    if is_bare_weights(Path(name).expanduser()) and not composed:
        return teacher_from_weights(Path(name).expanduser(), student)
    _check_path(name, "config.json", *(["modules.json"] if composed else ()))
    device = next((parameter.device for parameter in student.parameters()), torch.device("cpu"))
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            if composed:
                return _composed_teacher(name, student, trust_remote_code).to(device)
            # never left out: transformers would ask whoever sits at the terminal
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            teacher, loading = _class_of(config, student, name, trust_remote_code).from_pretrained(
                name, config=config, output_loading_info=True
            )
        except CheckpointError:
            raise
        except Exception as error:  # transformers, safetensors and the Hub client each raise their own
            if not trust_remote_code and _TRUST in str(error):
                raise _untrusted(name) from error
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                "distill", f"teacher must be a readable model folder or Hub name, got {name!r}: {first_line[:300]}"
            ) from error
    lacking = [*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])]
    if lacking:
        raise CheckpointError(
            "distill",
            f"teacher's files must hold every weight, got {name!r} without {sorted(lacking)[0]} ({len(lacking)} in "
            "all)",
            "it would teach from random weights",
        )
    check_values(teacher, dict(teacher.named_parameters()), f"distill: teacher {name!r}")
    return teacher.to(device)  # type: ignore[no-any-return]


def empty_model(name: str) -> nn.Module:
    """Return the model that a folder's config describes, in the type of its weights, on the meta device."""
    _check_path(name, "config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # else a terminal is asked
    except Exception as error:  # transformers and the Hub client each raise their own
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            "distill", f"teacher must have a readable config.json, got {name!r}: {first_line[:300]}"
        ) from error
    with torch.device("meta"):
        model: nn.Module = _class_of(config, nn.Module(), name, False)._from_config(config)
    return model.to(config.dtype) if isinstance(config.dtype, torch.dtype) else model


def _is_composed(student: nn.Module) -> bool:
    """Return whether a student is a model of sentence-transformers: several modules, listed in ``modules.json``."""
    return any(kind.__module__.startswith("sentence_transformers.") for kind in type(student).__mro__)


def _composed_teacher(name: str, student: Any, trust_remote_code: bool) -> nn.Module:
    """Return the model of the student's class that a folder of sentence-transformers, or the Hub, holds."""
    path, kind = Path(name).expanduser(), type(student)
    ours = getattr(student, "model_type", kind.__name__)
    written = path / "config_sentence_transformers.json"
    told: Any = parse_json(written.read_text(encoding="utf-8")) if written.is_file() else {}
    if (theirs := told.get("model_type", ours)) != ours:
        raise CheckpointError(
            "distill", f"teacher must be a {ours} as the student is, got {name!r}, which is a {theirs}"
        )
    if ours == "CrossEncoder" and not (path / "modules.json").is_file():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if not any("SequenceClassification" in one for one in config.architectures or ()):  # its head would be drawn
            raise CheckpointError(
                "distill",
                f"teacher must be a {ours}, got {name!r} of {config.architectures}",
                "it would teach from random weights",
            )
    device = next((str(parameter.device) for parameter in student.parameters()), "cpu")
    place = str(path) if path.exists() else name
    teacher: nn.Module = kind(place, device=device, trust_remote_code=trust_remote_code)
    return teacher


def _check_path(name: str, *files: str) -> None:
    path = Path(name).expanduser()
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or os.sep == "\\" in name
    if path.exists():
        if not any((path / file).is_file() for file in files):
            raise CheckpointError(
                "distill",
                f"teacher must be a folder with {' or '.join(files)}, got {name!r} without",
                "give the folder that save_model or save_pretrained wrote",
            )
    elif looks_like_path:
        raise CheckpointError("distill", f"teacher must be an existing folder or a Hub name, got {name!r}")


_TRUST = "trust_remote_code"  # what transformers names in its refusal


def _untrusted(name: str) -> CheckpointError:
    return CheckpointError(
        "distill",
        f"teacher must be of a class of transformers, got {name!r}, whose config.json names code that lies beside it "
        "(auto_map)",
        "it was not run. Read it, then set distill.trust_remote_code: true (--distill_trust_remote_code; eff "
        "cache-teacher --trust-remote-code), or load it and pass the object",
    )


def _class_of(config: Any, student: nn.Module, name: str, trust_remote_code: bool) -> Any:
    named = (config.architectures or [None])[0]
    own = [code for code in (getattr(config, "auto_map", None) or {}).values() if isinstance(code, str)]
    own = [code for code in own if code.rpartition(".")[2] == named]
    if own and trust_remote_code:
        return get_class_from_dynamic_module(own[0], name)
    known = [getattr(transformers, found, None) for found in config.architectures or ()]
    if known and known[0] is not None:
        return known[0]
    # a model class of the user's own is not an attribute of transformers
    kind = type(student)
    if hasattr(kind, "from_pretrained") and kind.__name__ in (config.architectures or [kind.__name__]):
        return kind
    if own:
        raise _untrusted(name)
    raise CheckpointError(
        "distill",
        f"teacher's config must name a class of transformers, got {config.architectures!r} in {name!r}",
        "load it yourself and pass the object",
    )
