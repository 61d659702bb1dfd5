"""`eff cache-teacher`: run a teacher once over a data set, so that students read its outputs from a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.cli.arguments import CommandOptions, bar, print_report, takes
from shared_core.cli.loading import build_model, check_named, device_name, load_folder
from shared_core.config.options import option
from shared_core.errors import ConfigError, require
from shared_core.files import hub_names
from shared_core.files.user_code import function
from shared_core.printing import counted, share_text, size_text

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

_WHERE = "eff cache-teacher"


@dataclass(frozen=True, kw_only=True)
class CacheOptions(CommandOptions):
    """Options of `eff cache-teacher`."""

    key: ClassVar[str] = _WHERE

    teacher: str = option(
        help="A Hugging Face folder or Hub name, or module:function that returns the model.", argument=True
    )
    data: str = option(
        help="module:function that returns batches, a data set, a list of examples, or a pair of one of the last two "
        "and a collator; or a .jsonl file with one example per line.",
    )
    out: Path = option(help="The folder to write. It must be new or empty, except with --resume.")
    temperature: float = option(2.0, "Temperature. Training must use the same.")
    top_k: int | None = option(None, "Classes to keep per position. Default: 64, or all if an example has one output.")
    dtype: Literal["float16", "float32"] = option("float16", "Format of the log-probabilities.")
    batch_size: int = option(8, "Examples per batch, for a data set.", low=1)
    labeled: bool = option(False, "Store only positions whose label is not -100.")
    fields: str | None = option(None, "Inputs that identify an example, such as input_ids,pixel_values. Default: all.")
    vocabulary: int | None = option(None, "Number of classes to use, if the student's vocabulary is smaller.")
    logits: str = option("logits", "Key or attribute of the logits in the teacher's output.")
    tokenizer: str | None = option(
        None, "The tokenizer: a folder or module:function. Default: the teacher's.", reads="model"
    )
    trust_remote_code: bool = option(False, "Run the code in the teacher's folder.")
    device: str = option("auto", "Where the teacher runs: auto, cpu, cuda, cuda:1, ...")
    shard_mb: int = option(128, "Size of each file in MB. Writing needs about three times as much memory.", low=1)
    resume: bool = option(False, "Continue an interrupted cache, or add examples.")
    as_json: bool = option(False, "Print the manifest as JSON.", flag="--json")

    def check_files(self) -> None:
        """Raise an error if what an option names does not exist. The teacher may also lie on the Hub."""
        super().check_files()
        check_named(self.data, "path" if self.data.endswith(".jsonl") else "function", *self.named("data"))
        hub_names.check_named(self.teacher, *self.named("teacher"))


@takes(CacheOptions)
def cache_teacher(asked: CacheOptions) -> None:
    """Run a teacher once and store its outputs, so that students train without it.

    The cache holds the top log-probabilities of every example and the probability of the rest, at one temperature.
    Training finds an example by its content, regardless of order, padding and batch size. It refuses a different
    temperature, vocabulary, tokenizer, template or data set.

    Under torchrun, each process runs the teacher on a part of the data.
    """
    import torch

    from shared_core.distillation.teacher_cache import (
        folder_fingerprint,
        template_fingerprint,
        tokenizer_fingerprint,
        write_teacher_cache,
    )
    from shared_core.distillation.teacher_cache.keys import batches_of
    from shared_core.distributed.job import Job

    data, out, teacher = asked.data, asked.out, asked.teacher
    with Job.joined() as job:
        examples = _lines(Path(data)) if data.endswith(".jsonl") else function(data, f"{_WHERE}: --data")()
        batches = batches_of(examples, asked.batch_size)
        names = None if asked.fields is None else [name.strip() for name in asked.fields.split(",") if name.strip()]
        place = device_name(asked.device, _WHERE)
        folder = Path(teacher) if Path(teacher).is_dir() else None
        words = folder if asked.tokenizer is None else _tokenizer(asked.tokenizer)
        fingerprints = {
            "teacher_files": None if folder is None else folder_fingerprint(folder),
            "tokenizer": None if words is None else tokenizer_fingerprint(words),
            "template": None if words is None else template_fingerprint(words),
        }
        network = _load(teacher, folder, asked.trust_remote_code).to(torch.device(place))
        with bar("batches", is_shown=job.is_main) as advance:
            made = write_teacher_cache(
                network, batches, out, temperature=asked.temperature, top_k=asked.top_k, dtype=asked.dtype,
                fields=names, vocabulary=asked.vocabulary, labeled=asked.labeled, logits=asked.logits,
                fingerprints=fingerprints, shard_bytes=asked.shard_mb * 2**20, progress=advance, resume=asked.resume,
                job=job,
            )  # fmt: skip
    if not job.is_main:
        return
    size = sum(file.stat().st_size for file in out.iterdir())
    values = {"out": str(out), "bytes": size, **made.to_dict()}
    print_report(values, _summary(values), as_json=asked.as_json)


def _lines(file: Path) -> list[Any]:
    """Return the examples in a file with one JSON object per line."""
    from shared_core.distillation.teacher_cache.keys import is_example
    from shared_core.files.json_yaml import parse_json

    try:
        with file.open(encoding="utf-8") as lines:
            found = [parse_json(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(_WHERE, f"--data must be a file with one JSON object per line, got {error}") from error
    odd = next((number for number, one in enumerate(found, start=1) if not is_example(one)), None)
    what = "no lines" if odd is None else f"something else in line {odd}"
    require(found and odd is None, _WHERE, f"--data must map names to numbers or flat lists of them, got {what}")
    return found


def _load(name: str, folder: Path | None, trust_remote_code: bool) -> nn.Module:
    if folder is None and ":" in name:
        return build_model(name, _WHERE)[0]
    # a name that is not a folder is looked up on the Hub
    return load_folder(folder or Path(name), _WHERE, trust_remote_code=trust_remote_code, allow_codes=True)


def _tokenizer(name: str) -> Any:
    from shared_core.distillation.teacher_cache import tokenizer_fingerprint

    found = Path(name) if Path(name).is_dir() else function(name, f"{_WHERE}: --tokenizer")()
    rule = f"--tokenizer must have a vocabulary, but {name} has none"
    remedy = "give a folder with tokenizer.json, or a function that returns the tokenizer"
    require(tokenizer_fingerprint(found) is not None, _WHERE, rule, remedy)
    return found


def _summary(values: dict[str, Any]) -> Iterator[str]:
    rows = counted(values["rows"], "example" if values["per_example"] else "position")
    examples = counted(values["examples"], "different example")
    yield f"Wrote {values['out']}: {size_text(values['bytes'])}, {examples}, {rows}."
    classes = counted(values["vocabulary"], "class", "classes")
    kept = "all" if values["top_k"] >= values["vocabulary"] else f"the top {values['top_k']:,}"
    yield f"Stored {kept} of {classes} at temperature {values['temperature']:g}."
    if values["top_k"] < values["vocabulary"]:
        mean, most = share_text(values["tail_mass_mean"]), share_text(values["tail_mass_max"])
        yield f"The other classes count as one, with {mean} of the probability on average and {most} at most."
    yield f"Train a student with --distill_teacher cache:{values['out']}"
