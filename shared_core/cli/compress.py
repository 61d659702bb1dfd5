"""`eff compress` and `eff decompress`: store a model in one small file, and restore its plain weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared_core.cli.arguments import CommandOptions, bar, force, print_report, takes
from shared_core.cli.loading import check_new, keep_report, note_unfinished, state_dict_of
from shared_core.config.options import option
from shared_core.errors import CheckpointError, require
from shared_core.printing import counted, duration, echo, most_telling, size_text, table
from shared_core.weight_clustering.config import MAX_BITS, MIN_BITS

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor  # `eff --help` must not wait for torch

    from shared_core.tools.compression import CompressedFile, Compression

# What a model needs besides its weights: config, tokenizer, processor. Not its training state, nor code.
_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".md"})
_LEFT_BEHIND = frozenset({
    "trainer_state.json", "eff_files.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"
})  # fmt: skip
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class CompressOptions(CommandOptions):
    """Options of `eff compress`."""

    key: ClassVar[str] = "eff compress"

    model: Path = option(
        help="A Hugging Face folder, a Lightning .ckpt, or a state dict file.", argument=True, reads="path"
    )
    out: Path = option(help="The file to write, such as model.eff.")
    force: bool = force()
    bits: int = option(5, "Bits per weight: 2**bits values per tensor, in [2, 8].", low=MIN_BITS, high=MAX_BITS)
    bits_of: tuple[str, ...] = option(
        (), "PATTERN=BITS for tensors or modules whose name matches (glob), or PATTERN=exact. Repeatable."
    )
    min_size: int = option(256, "Store tensors with fewer elements exactly.", low=0)
    every_layer: bool = option(False, "List every tensor, instead of the ten largest.", flag="--layers")
    as_json: bool = option(False, "Print the report as JSON.", flag="--json")

    def widths(self) -> dict[str, int | None]:
        """Return the bits of tensors by pattern, None for those stored exactly."""
        found: dict[str, int | None] = {}
        for pair in self.bits_of:
            pattern, _, bits = pair.rpartition("=")
            is_pair = pattern and (bits == "exact" or bits.isdecimal())
            self.require(is_pair, f"--bits-of must be PATTERN=BITS or PATTERN=exact, got {pair!r}")
            found[pattern] = None if bits == "exact" else int(bits)
        return found


@takes(CompressOptions)
def compress(asked: CompressOptions) -> None:
    """Compress a model into one small file, with its config and tokenizer.

    The weights of each tensor are clustered to a few values, so decompress and evaluate. Weights trained with
    --cluster_bits share few values already and are stored without loss. The ratio counts every byte of the file.
    """
    from shared_core.files.atomic import check_writable, is_free, make_folder
    from shared_core.tools.compressed_file import FREE_BYTES, FREE_RATIO
    from shared_core.tools.compression import CompressedFile
    from shared_core.tools.compression import compress as write

    out = asked.out
    rule = f"--out must not exist yet, got {out}"
    require(is_free(out) and not out.is_dir(), asked.key, rule, "choose another, or add --force", CheckpointError)
    check_writable(out, "eff compress: --out")
    make_folder(out.parent)
    files, widths = _files(asked.model), asked.widths()
    with bar("compressing") as advance:
        done = write(
            _tensors(asked.model), out, bits=asked.bits, bits_of=widths, min_size=asked.min_size, files=files,
            progress=advance,
        )  # fmt: skip
    started = time.perf_counter()
    for _ in _restored(CompressedFile(out, max_bytes=done.original_bytes + (1 << 40))):
        pass  # every payload is restored and compared with its CRC
    seconds = time.perf_counter() - started
    size = done.original_bytes + sum(len(content) for content in files.values())
    if size > FREE_BYTES + FREE_RATIO * done.file_bytes:
        echo(f"The ratio is above what eff decompress accepts by default. Give it --max-bytes {size}.", err=True)
    report = dataclasses.asdict(done) | {"path": str(out), "ratio": done.ratio, "decompression_seconds": seconds}
    keep_report(out, report)
    print_report(report, _lines(done, seconds, asked.every_layer), as_json=asked.as_json)


@dataclass(frozen=True, kw_only=True)
class DecompressOptions(CommandOptions):
    """Options of `eff decompress`."""

    key: ClassVar[str] = "eff decompress"

    file: Path = option(help="A file that eff compress wrote.", argument=True, reads="path")
    out: Path = option(help="The folder to write.")
    force: bool = force()
    max_bytes: int | None = option(
        None, "Refuse a file that restores to more bytes. Default: 64 MiB and 1,000 times its size."
    )
    as_json: bool = option(False, "Print JSON.", flag="--json")


@takes(DecompressOptions)
def decompress(asked: DecompressOptions) -> None:
    """Restore the weights of a compressed file as model.safetensors.

    The folder loads without efftrain: with from_pretrained if a Hugging Face folder was compressed, else with
    safetensors.torch.load_model. Every tensor is compared with its checksum.
    """
    from safetensors.torch import save_file

    from shared_core.files.atomic import atomic_folder
    from shared_core.tools.compression import CompressedFile

    check_new(asked.out, asked.key)
    started = time.perf_counter()
    compressed = CompressedFile(asked.file, max_bytes=asked.max_bytes)
    beside = {name: content for name, content in compressed.files().items() if _goes_along(Path(name))}
    tensors = dict(_restored(compressed))
    seconds = time.perf_counter() - started
    with atomic_folder(asked.out) as folder:
        # each tensor once, as save_pretrained and safetensors.torch.save_model store it
        save_file(tensors, folder / WEIGHTS_FILE, metadata={**compressed.index.ties, "format": "pt"})
        for name, content in beside.items():
            (folder / name).write_bytes(content)
    num_bytes = sum(entry.num_bytes for entry in compressed.index.tensors)
    report = {"tensors": len(tensors), "bytes": num_bytes, "files": sorted(beside), "decompression_seconds": seconds}
    shown = f"Decompressed {counted(len(tensors), 'tensor')} ({size_text(num_bytes)}) in {duration(seconds)}."
    print_report(report, [shown, f"Wrote {asked.out}."], as_json=asked.as_json)


def _restored(file: CompressedFile) -> Iterator[tuple[str, Tensor]]:
    with bar("decompressing") as advance:
        for number, named in enumerate(file.tensors(), 1):
            advance(number, len(file.index.tensors))
            yield named


def _tensors(path: Path) -> dict[str, Tensor]:
    note_unfinished(path)
    return state_dict_of(path, "eff compress")


def _goes_along(file: Path) -> bool:
    left_behind = file.name in _LEFT_BEHIND or file.name.startswith(".") or file.name.endswith(".eff.json")
    return file.suffix in _SUFFIXES and not left_behind


def _files(model: Path) -> dict[str, bytes]:
    if not model.is_dir():
        return {}
    found = {}
    for file in sorted(model.iterdir()):
        if file.is_file() and _goes_along(file):
            if _stays_inside(file.resolve(), model.resolve()):
                found[file.name] = file.read_bytes()
            else:
                echo(f"Left out {file.name}: it links to {file.resolve()}, outside the folder.", err=True)
    return found


def _stays_inside(file: Path, folder: Path) -> bool:
    # the Hub's cache: snapshots/<commit>/config.json is a link into blobs/
    home = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return file.is_relative_to(folder) or file.is_relative_to(home)


def _lines(done: Compression, seconds: float, every: bool) -> Iterator[str | Table]:
    sizes = f"{size_text(done.original_bytes)} to {size_text(done.file_bytes)}"
    other = f", including {size_text(done.other_bytes)} of config and tokenizer" if done.other_bytes else ""
    yield f"Compressed {sizes}: {done.ratio:.1f} times smaller. This is the whole file{other}."
    yield f"Compressing took {duration(done.seconds)}, decompressing and comparing {duration(seconds)}."
    headings = ("tensor", "shape", "coding", "values", "weights", "size", "before", "RMS change")
    title, tensors = most_telling(done.tensors, lambda line: line.stored_bytes, "tensor", every)
    yield table(f"The largest tensors, {title}", headings[:3], headings, map(_cells, tensors))
    yield f"Wrote {done.path}."


def _cells(line: Any) -> tuple[str, ...]:
    values = str(line.clusters) if line.clusters else "all"
    change = f"{line.rms_error:.2g}" if line.rms_error else "0"
    shape = "x".join(map(str, line.shape)) or "scalar"
    stored, original = size_text(line.stored_bytes), size_text(line.original_bytes)
    return line.name, shape, line.coding, values, f"{line.weights:,}", stored, original, change
