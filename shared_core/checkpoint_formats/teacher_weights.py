"""A teacher of the student's own class, from a file that holds weights and nothing else: an earlier generation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from shared_core.checkpoint_formats import open_ingredient
from shared_core.checkpoint_formats.plain import check_values, unlike
from shared_core.errors import CheckpointError


def is_bare_weights(path: Path) -> bool:
    """Return whether a path is a ``.safetensors`` file, or a folder with one of a model that has no ``config.json``."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("model*.safetensors"))
    return path.suffix == ".safetensors"


def teacher_from_weights(path: Path, student: nn.Module) -> nn.Module:
    """Return a copy of the student with the weights of such a path."""
    opened = open_ingredient(path)
    return same_class_teacher({name: opened.tensor(name) for name in (*opened.specs, *opened.ties)}, student, str(path))


def same_class_teacher(weights: Mapping[str, Tensor], student: nn.Module, source: str) -> nn.Module:
    """Return a copy of the student, on its device, with other weights.

    Args:
        weights: By the student's names, any dtype; of weights that it shares between modules one name is enough.
        student: A plain module, without techniques that replace its layers.
        source: Where they come from, for errors.

    Example:
        >>> import torch
        >>> student, earlier = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> teacher = same_class_teacher(earlier.state_dict(), student, "earlier")
        >>> torch.equal(teacher.weight, earlier.weight), teacher.weight is student.weight
        (True, False)
    """
    # Layers that techniques have replaced are in the student already: a copy of it would be no plain model.
    kinds = map(type, student.modules())
    replaced = next((kind for kind in kinds if kind.__module__.startswith("shared_core.")), None)
    if replaced is not None:
        raise CheckpointError(
            "distill",
            f"teacher {source} must be of a class that can be built where a technique replaces the student's layers, "
            f"here by {replaced.__name__}",
            "build the teacher yourself and pass the module",
        )
    teacher = copy.deepcopy(student)
    missing, others = unlike(teacher, weights)
    if missing or others:
        raise CheckpointError(
            "distill",
            f"teacher {source} must hold the weights of a {type(student).__name__} like the student, got missing "
            f"{missing[:3]} and others {others[:3]}",
            "a teacher of another size needs a class that can be built: a Transformers folder, a .ckpt with "
            "hyperparameters, or the module itself",
        )
    check_values(teacher, weights, f"distill: teacher {source}")
    # strict=False: `unlike` has checked names, ties aside.
    teacher.load_state_dict(dict(weights), strict=False)
    return teacher
