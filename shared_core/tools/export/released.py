"""Write a trained model in the layout of the quantized release that it was trained from."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Released, released_config, values_in
from shared_core.checkpoint_formats.released_layouts import Layout, Stored, block_sums, over_blocks
from shared_core.checkpoint_formats.saved_rows import SavedRows, saved_rows
from shared_core.errors import CompatibilityError, ConfigError, require
from shared_core.files.atomic import atomic_folder, scratch_folder
from shared_core.modules.matching import output_axis_of_experts
from shared_core.modules.weight_views import as_rows
from shared_core.quantization.fake_quant_layers import is_quantized
from shared_core.tools.export.served import FUSED, check_difference
from shared_core.tools.export.source import baked_copy, check_finite, quantized_reference, quiet
from shared_core.tools.measuring import difference, outputs

_WHERE = "export_released"
_LARGEST_NVFP4 = 448.0 * 6.0


@dataclasses.dataclass(frozen=True)
class ReleasedReport:
    """Report of a folder in a released layout.

    Attributes:
        path: The folder.
        bytes: Size of its weight files.
        format: The release's ``quant_method``, with compressed-tensors' format.
        quantized: Weights with codes, by their names in float.
        kept_scales: Weights with all of their released scales.
        unchanged: Weights with the released bytes.
        changed_codes: Codes that differ from the released ones.
        clipped_codes: Values beyond the largest code of their scale, which takes their place.
        codes: All codes.
        changed_scales: Scales that differ from the released ones.
        scales: All scales.
        rounding_error: Weight → ``‖ŵ - w‖/‖w‖``, for weights with values off the released grid.
        copied: Tensors of the release that the model lacks, such as those of layers that predict more tokens.
        equal_layers: Weights whose bytes were decoded and compared; None if not compared.
        largest_difference: Between the outputs of the folder, loaded by transformers, and of the model on rounded
            weights, relative to the largest. None without example inputs.
    """

    path: Path
    bytes: int
    format: str
    quantized: tuple[str, ...]
    kept_scales: int
    unchanged: int
    changed_codes: int
    clipped_codes: int
    codes: int
    changed_scales: int
    scales: int
    rounding_error: dict[str, float]
    copied: tuple[str, ...] = ()
    equal_layers: int | None = None
    largest_difference: float | None = None


def export_released(
    model: nn.Module,
    folder: Path | str,
    *,
    base: Path | str | None = None,
    example_inputs: Any = None,
    verify: bool = True,
) -> ReleasedReport:
    """Write a model in the layout of the release that it was trained from: same files, names, dtypes and config.

    Blocks whose weights all lie on the released grid keep their released scales, so unchanged weights give the
    released bytes. Other blocks, such as those of merged adapters, keep their scale too, unless one by the format's own
    rule gives a smaller squared error. The report says what rounding costs. All other tensors are cast to the release's
    dtypes.

    Args:
        model: A transformers model, in float or in or after quantization-aware training. It is not changed.
        folder: New or empty.
        base: The released folder. None: the folder that the model was loaded from.
        example_inputs: Inputs on which the folder, loaded by transformers, is compared with the model.
        verify: Decode every tensor in the written files and compare it with the model's.

    Raises:
        CheckpointError: If the base is no release in a format that can be written.
        CompatibilityError: If the model does not fit the base, or the folder differs from the model; nothing is
            written.

    Source: OCP Microscaling Formats 1.0; compressed-tensors 0.20; transformers 5.23.

    Example:
        ``export_released(trained, "served", base="gpt-oss-20b").changed_codes``
    """
    _check_model(model)
    released = Released(released_config(model if base is None else base)[0])
    _check_sizes(model, released)
    plain = _plain(model)
    saved = _fitting_rows(plain, released)
    values = _Values(plain, saved)
    globals_ = _new_global_scales(released, values)
    results: dict[str, _Result] = {}
    with atomic_folder(folder) as temporary:
        _copy_files(released, temporary)
        for name, layout in released.weights.items():
            if name in saved:
                check_finite(_WHERE, name, values.rows(name))
                parts, results[name] = _encode(layout, released.parts(layout), values.rows(name), globals_.get(name))
                _write(temporary, {layout.keys[part]: value for part, value in parts.items()}, released)
        for key in saved.keys() - released.weights.keys():
            _write(temporary, {key: _cast(key, values.tensor(key), released.tensors[key])}, released)
        if verify:
            _check_bytes(temporary, released, values)
        gap = None
        if verify and example_inputs is not None:
            gap = _check_outputs(temporary, plain, saved, example_inputs)
        size = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
    return _report(folder, size, released, results, saved, len(results) if verify else None, gap)


def _report(
    folder: Path | str, size: int, released: Released, results: dict[str, _Result], saved: Mapping[str, SavedRows],
    equal: int | None, gap: float | None,
) -> ReleasedReport:  # fmt: skip
    owned = {key for name in results for key in released.weights[name].keys.values()} | saved.keys()
    stems = {name.removesuffix("weight") for name in results}
    copied = tuple(key for key in released.files if key not in owned and f"{key.rpartition('.')[0]}." not in stems)
    method, format = released.quantization["quant_method"], released.quantization.get("format")
    return ReleasedReport(
        Path(folder), size, f"{method} {format}" if format else method, tuple(results),
        kept_scales=sum(not one.counts["changed_scales"] for one in results.values()),
        unchanged=sum(not one.counts["changed_codes"] + one.counts["changed_scales"] for one in results.values()),
        **{name: sum(one.counts[name] for one in results.values()) for name in _COUNTS},
        rounding_error={name: one.error for name, one in results.items() if one.error is not None}, copied=copied,
        equal_layers=equal, largest_difference=gap,
    )  # fmt: skip


def _check_model(model: Any) -> None:
    message = f"model must be one of transformers, got {type(model).__name__}"
    require(hasattr(model, "save_pretrained") and hasattr(model, "config"), _WHERE, message, "load its folder")
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(_WHERE, "model must have no adapters, got PEFT's", "call merge_and_unload() first")
    if getattr(model, "hf_quantizer", None) is not None:
        rule = "model must hold float weights, got quantized ones"
        raise ConfigError(_WHERE, rule, "load it with dequantize=True in its quantization config")


_SIZES = ("_layers", "_size", "_heads", "_experts")


def _check_sizes(model: Any, released: Released) -> None:
    """Refuse a model of other sizes: the release's config would describe a larger one."""
    text = released.config.get("text_config") or {}
    for theirs, own in ((released.config, model.config), (text, getattr(model.config, "text_config", None))):
        for name, size in theirs.items():
            found = getattr(own, name, size)
            if name.endswith(_SIZES) and isinstance(size, int) and found != size:
                rule = f"{name} must be the same in the model and the release, got {found} and {size}"
                raise CompatibilityError(_WHERE, rule, "give the release that the model was trained from as base")


def _plain(model: nn.Module) -> Any:
    """Return the model, or its baked copy if it has quantizers."""
    if not any(is_quantized(module) for module in model.modules()):
        return model
    reference, names = quantized_reference(model, _WHERE, lambda *_: None)
    return baked_copy(reference, names)[0]


def _fitting_rows(model: Any, released: Released) -> dict[str, SavedRows]:
    """Return the rows of each tensor in transformers' files, if the release has all of them."""
    state = model.state_dict()
    rows = saved_rows(model, (name for name, value in state.items() if isinstance(value, Tensor)))
    there = released.weights.keys() | released.files.keys()
    first: dict[int, str] = {}
    for key, at in rows.items():
        if key in there:
            first |= {state[name].data_ptr(): key for name in at.held}
    lacking = [
        key for key, at in rows.items() if key not in there and state[next(iter(at.held))].data_ptr() not in first
    ]
    if lacking:
        rule = f"the release must hold {lacking[0]}, but {released.path} does not"
        raise CompatibilityError(_WHERE, rule, "give the release that the model was trained from as base")
    return {key: at for key, at in rows.items() if key in there}


class _Values:
    """The model's tensors under their names in transformers' files."""

    def __init__(self, model: nn.Module, saved: Mapping[str, SavedRows]) -> None:
        self.saved, self._rows = saved, {}
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                module = model.get_submodule(name.rpartition(".")[0])
                stacked = value.ndim == 3 and output_axis_of_experts(module) is not None
                self._rows[name] = as_rows(module, value) if stacked else value.reshape(-1, *value.shape[1:])

    def rows(self, key: str) -> Tensor:
        """Return the tensor with one row per output."""
        return self.saved[key].gather(self._rows).cpu()

    def tensor(self, key: str) -> Tensor:
        """Return the tensor in its shape in the file."""
        rows, at = self.rows(key), self.saved[key]
        if not at.shape:
            return rows.reshape(())
        if len(at.shape) == 3 and max(at.shape[1:]) > 1:
            stacked = rows.view(at.shape[0], -1, rows.shape[-1])
            return stacked if at.inputs_last else stacked.mT
        if len(at.shape) == 2 and at.shape[0] == 1 < at.shape[1]:
            return rows.t()
        return rows.reshape(at.shape[0], *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class _Result:
    """What became of a weight: numbers as in `ReleasedReport`, and the error of rounding; None on its grid."""

    counts: Mapping[str, int]
    error: float | None


_COUNTS = ("changed_codes", "clipped_codes", "codes", "changed_scales", "scales")


def _encode(
    layout: Layout, parts: dict[str, Tensor], weight: Tensor, global_scale: Tensor | None
) -> tuple[dict[str, Tensor], _Result]:
    """Return the file's tensors for a weight, on the released scales where its blocks lie on them."""
    pieces = list(layout.pieces(parts))
    one = layout.read(pieces[0]).codes.shape  # all pieces have the same
    shape = (len(pieces) * one[0], one[1])
    if weight.shape != shape:
        rule = f"{layout.name} must have one shape, got {tuple(weight.shape)} in the model and {shape} in the release"
        raise CompatibilityError(_WHERE, rule, "give the release that the model was trained from as base")
    found: dict[str, list[Tensor]] = {}
    fits, wrong, norm, counts = True, 0.0, 0.0, dict.fromkeys(_COUNTS, 0)
    for piece, part_of_rows in zip(pieces, torch.split(weight, len(weight) // len(pieces)), strict=True):
        rows, old = part_of_rows.float(), layout.read(piece)
        new, is_on_grid = _encode_piece(layout, piece, rows, old, global_scale)
        for part, value in layout.write(new, piece).items():
            found.setdefault(part, []).append(value)
        counts = {name: counts[name] + count for name, count in _counts(layout, rows, new, old).items()}
        fits = fits and is_on_grid
        wrong += float((new.values - rows).square().sum())
        norm += float(rows.square().sum())
    error = None if fits else (wrong / norm) ** 0.5 if norm else 0.0
    whole = {part: torch.cat(values) if len(values) > 1 else values[0] for part, values in found.items()}
    return whole, _Result(counts, error)


def _counts(layout: Layout, rows: Tensor, new: Stored, old: Stored) -> dict[str, int]:
    moved = new.step != old.step
    if new.zero_point is not None and old.zero_point is not None:
        moved = moved | (new.zero_point != old.zero_point)
    marks = (new.codes != old.codes, layout.clipped(rows, new), moved)
    changed, clipped, changed_scales = (int(mark.sum()) for mark in marks)
    return dict(zip(_COUNTS, (changed, clipped, rows.numel(), changed_scales, moved.numel()), strict=True))


def _encode_piece(
    layout: Layout, parts: dict[str, Tensor], rows: Tensor, old: Stored, global_scale: Tensor | None
) -> tuple[Stored, bool]:
    """Return what to write, and True if all values lie on the released grid."""
    if global_scale is not None:
        return _refitted(layout, dataclasses.replace(old, global_scale=global_scale), parts, rows), False
    kept = _with_released_codes(layout.encoded(rows, old), old)
    fits = _on_grid(layout, kept, parts, rows)
    if bool(fits.all()):
        return kept, True
    fresh = _refitted(layout, kept, parts, rows)
    errors = [block_sums((one.values - rows).square(), one.block) for one in (kept, fresh)]
    return _mixed(kept, fresh, fits | (errors[0] <= errors[1])), False


def _with_released_codes(found: Stored, stored: Stored) -> Stored:
    """Return codes that are the released ones where values are equal, which keeps the sign of zeros."""
    same = found.values == stored.values
    return dataclasses.replace(found, codes=torch.where(same, stored.codes, found.codes))


def _on_grid(layout: Layout, kept: Stored, parts: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return which blocks equal their codes times their scales, as products in float32 or rounded to 16 bits."""
    exact = kept.values
    ways = (exact, exact.bfloat16().float(), exact.half().float(), layout.loaded(kept, parts).float())
    found = [over_blocks(way == rows, kept.block, "all") for way in ways]
    return torch.stack(found).any(0)


def _refitted(layout: Layout, like: Stored, parts: dict[str, Tensor], rows: Tensor) -> Stored:
    """Return the weight with new scales, and zero points, by the format's own rule."""
    low, high = (over_blocks(rows, like.block, way) for way in ("amin", "amax"))
    scale, zero_point = layout.fresh(low, high, like)
    fresh = dataclasses.replace(like, scale=scale, zero_point=None if like.zero_point is None else zero_point)
    fresh = layout.read({**parts, **layout.write(fresh, parts)})  # scales as the file rounds them
    return layout.encoded(rows, fresh)


def _mixed(kept: Stored, fresh: Stored, keeps: Tensor) -> Stored:
    """Return the blocks of one where `keeps` is True, and those of the other elsewhere."""
    zeros, others = kept.zero_point, fresh.zero_point
    return dataclasses.replace(
        kept,
        scale=torch.where(keeps, kept.scale, fresh.scale),
        zero_point=None if zeros is None or others is None else torch.where(keeps, zeros, others),
        codes=torch.where(kept.spread(keeps), kept.codes, fresh.codes),
    )


def _new_global_scales(released: Released, values: _Values) -> dict[str, Tensor]:
    """Return NVFP4's global scale of weights that outgrew the released one, and of those fused with them."""
    found: dict[str, Tensor] = {}
    for group in _fused(released):
        largest, outgrown = {}, False
        for name in group:
            layout = released.weights[name]
            if "weight_global_scale" in layout.keys and name in values.saved:
                scale = released.tensors[layout.keys["weight_global_scale"]].float()
                largest[name] = values.rows(name).float().abs().amax()
                # a weight rounded to 16 bits may be above the largest value by half a step of that type
                outgrown = outgrown or bool(largest[name] * scale > _LARGEST_NVFP4 * 1.004)
        if outgrown:
            shared = _LARGEST_NVFP4 / torch.stack(list(largest.values())).amax()
            found |= dict.fromkeys(largest, shared)
    return found


def _fused(released: Released) -> Iterator[list[str]]:
    """Yield the weights that share one global scale."""
    seen: set[str] = set()
    for name in released.weights:
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        parts = next((parts for parts in FUSED if own in parts), (own,))
        group = [key for part in parts if (key := f"{parent}.{part}.weight") in released.weights] or [name]
        if name not in seen:
            yield group
        seen |= {*group}


def _cast(key: str, value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor without codes in the release's dtype."""
    if value.is_floating_point() and not (like.is_floating_point() and like.element_size() > 1):
        rule = f"{key} must have a scale in the release, got {like.dtype} without one"
        raise CompatibilityError(_WHERE, rule, "its format is not supported")
    return value.to(like.dtype)


def _copy_files(released: Released, folder: Path) -> None:
    """Copy the release's files, without weights in other formats and without subfolders, which hold copies of them."""
    weights = {file.name for file in released.files.values()}
    others = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx"}
    for file in sorted(released.path.iterdir()):
        if file.is_file() and (file.name in weights or file.suffix not in others):
            shutil.copyfile(file, folder / file.name)


def _write(folder: Path, tensors: Mapping[str, Tensor], released: Released) -> None:
    """Replace tensors in copies of the released files, in place, so that nothing else in the files changes."""
    for key, value in tensors.items():
        file = folder / released.files[key].name
        with file.open("r+b") as stream:
            size = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(size))[key]
            rule = f"{key} must have the shape {entry['shape']} of the release, got {[*value.shape]}"
            require([*value.shape] == entry["shape"], _WHERE, rule, "give the model's own release", CompatibilityError)
            stream.seek(8 + size + entry["data_offsets"][0])
            stream.write(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _check_bytes(folder: Path, base: Released, values: _Values) -> None:
    """Decode the written files, and compare them with the model's weights and the release."""
    written = Released(folder)
    checked = set()
    for name, layout in written.weights.items():
        if name not in values.saved:
            continue
        pieces = list(layout.pieces(written.parts(layout)))
        weight = values.rows(name)
        for piece, rows in zip(pieces, torch.split(weight, len(weight) // len(pieces)), strict=True):
            stored = layout.read(piece)
            # the codes nearest to the model's weights, on the scales in the file
            meant = layout.encoded(rows.float(), stored)
            if not torch.equal(meant.values, stored.values):
                gap = float((meant.values - stored.values).abs().max())
                raise _differs(name, f"a difference of {gap:.3g}")
        checked |= {*layout.keys.values()}
    for key in written.files.keys() - checked:
        own = key in values.saved
        like = base.tensors[key]
        expected = values.tensor(key).to(like.dtype) if own else like
        if not _same_bits(written.tensors[key], expected):
            raise _differs(key, "other values")


def _differs(name: str, got: str) -> CompatibilityError:
    return CompatibilityError(_WHERE, f"{name} must be the model's in the file, got {got}", "nothing was written")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = (value.contiguous().flatten().view(torch.uint8) for value in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


def _check_outputs(folder: Path, model: Any, saved: Mapping[str, SavedRows], inputs: Any) -> float:
    """Return how far the outputs of the folder in transformers are from those of the model on its rounded weights."""
    rounded = copy.deepcopy(model).float().cpu().eval()
    _round_(rounded, Released(folder), saved)
    with scratch_folder() as scratch, quiet():
        for file in folder.iterdir():
            if file.name != "config.json":
                (scratch / file.name).symlink_to(file.resolve())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # a released config has no such key; it makes transformers dequantize on every machine
        of_text = config if "quantization_config" in config else config["text_config"]
        of_text["quantization_config"]["dequantize"] = True
        (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
        # transformers (5.23) leaves weights without codes beside FP8 in the file's dtype
        loaded = type(model).from_pretrained(scratch, dtype=torch.float32).float().eval()
        # frequencies of positions that `model.bfloat16()` rounded are not in any file
        own, theirs = dict(rounded.named_buffers()), dict(loaded.named_buffers())
        for name, value in model.named_buffers():
            if value.dtype in (torch.bfloat16, torch.float16) and name in theirs:
                own[name].copy_(theirs[name])
        gap = difference(outputs(rounded, inputs), outputs(loaded, inputs))
    check_difference(_WHERE, "folder", gap, 1e-4)
    return gap


def _round_(model: nn.Module, written: Released, saved: Mapping[str, SavedRows]) -> None:
    """Give a model the values in a folder."""
    found = values_in(written, model, saved, lambda layout, part: layout.loaded(layout.read(part), part).float())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in found:
                value.copy_(found[name])
