"""Images and their labels from a folder, a table or arrays, made ready for a model a batch at a time."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from hf_eff.evaluation.tables import empty, goals, label_column, load_from, open_table, refused, unreadable
from shared_core.libraries import optional

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_PIXELS = "pixel_values"


class ImageExamples:
    """Images of a local file or folder, read when a batch is asked for.

    Args:
        file: A folder with one folder of images a class; a table or saved data set with a column of images, of paths
            to them, or ``pixel_values``; or an ``.npz`` of ``images`` (uint8, ``(n, height, width[, channels])``) or
            ``pixel_values`` (floats as the model takes them) and ``labels``.
        folder: Holds the image processor; not needed for ``pixel_values``.
        config: The model's.
        regression: Whether labels are numbers to predict.
    """

    def __init__(self, file: Path, folder: Path, config: Any, *, regression: bool) -> None:
        optional("PIL", "examples", "eff soup --task")
        self._file, self._mode = file, "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        self._data, labels = _read(file)
        if not len(self._data):
            raise empty(file)
        self._labels = goals(labels, config, regression, file)
        self._processor: Any = None
        if _PIXELS in self._data.column_names:
            self._data = self._data.with_format("numpy")
        else:
            self._processor = load_from(AutoImageProcessor, folder, "image processor", f"data with {_PIXELS}")
        self._batch(0, 1)

    def digest(self) -> str:
        """Return a hash of the images and labels."""
        found = hashlib.sha256(repr((self._labels, self._processor and self._processor.to_dict())).encode())
        for number in range(len(self._labels)):
            array = np.ascontiguousarray(self._images(number, number + 1)[0])
            found.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
        return found.hexdigest()

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield images as the model takes them, ``(n, channels, height, width)``, and their labels."""
        for start in range(0, len(self._labels), size):
            labels = torch.tensor(self._labels[start : start + size], dtype=torch.float64)
            yield {_PIXELS: self._batch(start, start + size)}, labels

    def _batch(self, begin: int, end: int) -> Tensor:
        images = self._images(begin, end)
        if self._processor is None:
            return torch.from_numpy(np.stack(images))
        pixels: Tensor = self._processor(images=images, return_tensors="pt")[_PIXELS]
        return pixels

    def _images(self, begin: int, end: int) -> list[Any]:
        if self._processor is None:
            return [np.asarray(image, dtype=np.float32) for image in self._data[begin:end][_PIXELS]]
        try:
            return [_opened(image).convert(self._mode) for image in self._data[begin:end]["image"]]
        except OSError as error:
            raise unreadable(self._file, error) from error


def _read(file: Path) -> tuple[Any, list[Any]]:
    """Return a data set with a column ``image`` or ``pixel_values``, and the labels."""
    if file.suffix == ".npz":
        return _read_arrays(file)
    if file.is_dir() and not any((file / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return _read_folder(file)
    data = open_table(file)
    labels = list(data[label_column(data.column_names, file)])
    if _PIXELS in data.column_names:
        return data.select_columns([_PIXELS]), labels
    pictures = [name for name, feature in data.features.items() if type(feature).__name__ == "Image"]
    named = [name for name in ("image", "img", "file_name", "path") if name in data.column_names]
    if pictures:
        return data.select_columns(pictures[:1]).rename_columns({pictures[0]: "image"}), labels
    if named:
        return _pictures([str(file.parent / str(path)) for path in data[named[0]]]), labels
    rule = f"have a column of images, of paths to them (image, img, file_name, path), or {_PIXELS}"
    raise refused(rule, data.column_names, file)


def _opened(image: Any) -> Any:
    """Return an image; that of a file as it lies there, whatever its metadata say of the orientation."""
    from PIL import Image

    if not isinstance(image, dict):
        return image
    return Image.open(io.BytesIO(image["bytes"]) if image["bytes"] else image["path"])


def _pictures(images: Any) -> Any:
    """Return a data set of paths or arrays."""
    datasets = optional("datasets", "examples", "eff soup --task")
    return datasets.Dataset.from_dict({"image": images}, datasets.Features({"image": datasets.Image(decode=False)}))


def _read_folder(folder: Path) -> tuple[Any, list[Any]]:
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise refused("be a saved data set, or hold a folder of images for each class", "neither", folder)
    names = [path.parent.name for path in paths]
    return _pictures([str(path.absolute()) for path in paths]), [int(it) if it.isdigit() else it for it in names]


def _read_arrays(file: Path) -> tuple[Any, list[Any]]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise unreadable(file, error) from error
    labels = held[label_column(sorted(held), file)]
    name = _PIXELS if _PIXELS in held else "images"
    values = held.get(name, np.empty(0))
    if name == _PIXELS:
        fits, rule = values.ndim == 4 and values.dtype.kind == "f", f"{_PIXELS} of floats, (n, channels, height, width)"
    else:
        fits = values.dtype == np.uint8 and (values.ndim == 3 or (values.ndim == 4 and values.shape[-1] in (3, 4)))
        rule = f"images of uint8, (n, height, width) or (n, height, width, 3), or {_PIXELS}"
    if not fits or labels.shape != values.shape[:1]:
        got = f"{values.dtype} {values.shape} and labels {labels.shape}"
        raise refused(f"hold {rule}, and one label each", got, file)
    datasets = optional("datasets", "examples", "eff soup --task")
    data = datasets.Dataset.from_dict({_PIXELS: values}) if name == _PIXELS else _pictures(list(values))
    return data, labels.tolist()
