"""The options of distillation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared_core.config.environments import RUN_ENVIRONMENTS
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.config.training_time import Position
from shared_core.errors import CheckpointError, ConfigError, require
from shared_core.files.hub_names import check_named

EMA = "ema"
"""Value of `teacher` for the student's own moving average."""
SELF = "self"
"""Value of `teacher` for a frozen copy of the student as it is when the run starts."""
MUTUAL = "mutual"
"""Value of `teacher` for students that teach each other."""
CACHE = "cache:"
"""Prefix of a cached teacher's folder."""
Teaching = Literal["NAME", "NAME,NAME", "self", "ema", "cache:FOLDER", "mutual"]
TeacherDtype = Literal["as_saved", "float32", "bfloat16", "float16", "int8", "nf4"]

_ONE: dict[str, Any] = {"teaching": ("NAME",)}
_NOT_CACHED: dict[str, Any] = {"teaching": ("NAME", "NAME,NAME", "self", "ema", "mutual")}
_OF_TEACHER: dict[str, Any] = {"teaching": ("NAME", "NAME,NAME", "self", "ema", "cache:FOLDER")}
_NAMED: dict[str, Any] = {"teaching": ("NAME", "NAME,NAME", "cache:FOLDER")}
_PAIRED: dict[str, Any] = {"teaching": ("NAME", "self")}
_CHUNKED: dict[str, Any] = {
    "teaching": ("NAME", "self", "ema"),
    "divergence": ("forward_kl", "reverse_kl", "jsd"),  # the kernels in eff_kernels
    "confidence": (0.0,),
}

_NOT_MUTUAL = {
    "lora": "peers train whole models from random weights, but adapters train on a frozen base",
    "primary_weights": "peers have no float32 copies, so rounding would lose updates of 16-bit weights; load the "
    "model in float32",
}


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TechniqueConfig):
    """Options for training a student on its teacher's outputs.

    Example:
        >>> DistillConfig(teacher="runs/teacher", temperature="4").temperature
        4.0
        >>> DistillConfig(teacher="runs/a, runs/b").teachers
        ('runs/a', 'runs/b')
    """

    about: ClassVar[str] = "Trains a student on its teacher's outputs."
    key: ClassVar[str] = "distill"
    switch: ClassVar[str] = "teacher"

    conflicts: ClassVar[Mapping[str, str]] = {
        "manual_optimization": "training_step returns no loss that a soft term could join; call "
        "shared_core.distillation.kd_loss in it",
        "unequal_ranks": "the soft term would be averaged per rank while the label count differs between ranks; leave "
        "average_tokens_across_devices at True",
        "lbfgs": "LBFGS evaluates its closure many times a step, and the teacher with it; use another optimizer",
        "zero3": "stage 3 splits the teacher too, and nothing gathers it; use stage 1 or 2, with offload_optimizer to "
        "save memory",
        "fsdp1": "the teacher is not prepared under FSDP1; use DDP or FSDP2",
    }
    works_in: ClassVar[tuple[str, ...]] = (
        "pruning_callback", "deepspeed_fp16", "lightning_deepspeed", "tensor_parallel",
    )  # fmt: skip
    figures: ClassVar[Mapping[str, Figure]] = {
        "soft_loss": Figure("mean soft term of the latest step, with T²", in_bar=True),
        "task_loss": Figure("mean task loss of the latest step", in_bar=True),
        "hidden_loss": Figure("mean term of hidden pairs, before its weight", only="with `hidden`"),
        "attention_loss": Figure("mean term of attention pairs, before its weight", only="with `attention`"),
        "alpha": Figure("weight of the task loss in the latest step", only="with `alpha_end`"),
        "temperature": Figure("T in the latest step", only="with `temperature_end`"),
        "unlabeled_share": Figure("share of unlabeled examples in the latest step", only="with `unlabeled_field`"),
        "peer_task_loss": Figure("mean task loss of the other students", only="with `teacher: mutual`"),
    }

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"budget_mib": ("chunked",)}
    conditions: ClassVar[Mapping[str, str]] = {
        "teaching": "teacher",
        "of_classes": "a divergence over classes (not logit_mse or bernoulli_kl)",
    }

    teacher: Any = option(
        flag_type=str,
        help="folder or Hub name of the teacher, or module:function (or file.py:function) that returns it, or several "
        "with commas; self: a frozen copy of the model as the run starts; ema: the student's own moving average; "
        "cache:FOLDER: output of eff cache-teacher; mutual: students teach each other; in Python, modules too",
    )
    peers: Any = option(
        2,
        flag_type=str,
        help="number of students, where the others start from random weights; or folders or Hub names of the others, "
        "with commas; in Python, modules too",
        only_with={"teaching": (MUTUAL,)},
    )
    teacher_weights: tuple[float, ...] = option(
        (), help="weight of each teacher; default: equal", above=0, only_with=_OF_TEACHER
    )
    teacher_dtype: TeacherDtype = option(
        "as_saved",
        help="format of the teacher's weights; int8 needs torchao, nf4 bitsandbytes. A module passed in Python is "
        "changed in place",
        only_with={"teaching": ("NAME", "NAME,NAME", "self", "cache:FOLDER")},
        each=dict.fromkeys(("int8", "nf4"), _NAMED),
    )
    trust_remote_code: bool = option(
        False, help="run code from a teacher's folder or Hub repository (auto_map in its config.json)"
    )
    ema_decay: float = option(
        0.999,
        low=0,
        below=1,
        help="decay of the ema teacher per step, at most 1 - 1/(n + 2) after n steps",
    )
    divergence: Literal[
        "forward_kl", "reverse_kl", "jsd", "soft_cross_entropy", "hard_label", "logit_mse", "bernoulli_kl"
    ] = option(
        "forward_kl",
        help="loss between the student's and the teacher's outputs",
        each=dict.fromkeys(("hard_label", "logit_mse", "bernoulli_kl"), _NOT_CACHED),  # a cache holds probabilities
    )
    beta: float = option(
        0.5, low=0, high=1, help="mix of jsd: 0 is the forward KL, 1 the reverse", only_with=_NOT_CACHED
    )
    temperature: float = option(
        2.0, above=0, help="T, which softens both distributions; the soft term is multiplied by T²"
    )
    temperature_end: float | None = option(
        None, above=0, help="T at end, changed linearly from begin; default: constant", only_with=_NOT_CACHED
    )
    scale_by_temperature: bool = option(True, help="multiply the soft term by T²")
    alpha: float | None = option(
        None,
        low=0,
        high=1,
        help="weight of the task loss; the soft term gets 1 - alpha; default: 0 with teacher=self, else 0.5",
    )
    alpha_end: float | None = option(
        None, low=0, high=1, help="alpha at end, changed linearly from begin; default: constant"
    )
    confidence: float = option(
        0.0,
        low=0,
        below=1,
        help="use only positions where the teacher's largest probability is at least this; others add 0 to the mean",
        only_with={"of_classes": (True,), "teaching": ("NAME", "NAME,NAME", "self", "ema")},
    )
    unlabeled_field: str | None = option(
        None,
        help="batch key (data set column) with a bool that marks examples without a label, which only the soft term "
        "trains",
        only_with=_OF_TEACHER,
    )
    vocab_size: int | None = option(
        None,
        low=1,
        help="compare only the first classes, for heads padded to different sizes over one tokenizer",
        only_with=_OF_TEACHER,
    )
    chunked: bool = option(
        False,
        help="compute a language model's loss in chunks, without storing the logits of all positions",
        only_with=_CHUNKED,
    )
    budget_mib: float | None = option(None, above=0, help="MiB of logits at a time; default: 64 on CPU, 512 elsewhere")
    begin: Position = option(
        0.0,
        help="first step with the soft term: a step, a fraction of the run, or epochs ('2ep')",
        only_with=_OF_TEACHER,
    )
    end: Position = option(1.0, help="first step without the soft term; 1.0: never", only_with=_OF_TEACHER)
    hidden: tuple[str, ...] = option(
        (),
        help="student=teacher pairs of submodules (names, globs) to match, such as layer.1=layer.3; for different "
        "widths, a linear projection is trained",
        only_with=_PAIRED,
    )
    hidden_loss: Literal["mse", "cosine", "rkd", "similarity_preserving", "cka"] = option(
        "mse", help="loss of hidden pairs: mse or cosine of features, else relations within a micro-batch"
    )
    hidden_weight: float = option(1.0, above=0, help="weight of the hidden term, added to the loss")
    attention: tuple[str, ...] = option(
        (),
        help="student=teacher pairs of attention modules (names, globs) whose maps should match",
        only_with=_PAIRED,
    )
    attention_weight: float = option(1.0, above=0, help="weight of the attention term, added to the loss")
    init_layers: str | None = option(
        None, help="start from these teacher layers: even, first, last, or numbers, such as 0,2,4", only_with=_ONE
    )
    student: str | None = option(None, help="submodule whose output is distilled; default: the model")
    logits: str = option(
        "logits",
        help="key or attribute of the logits in the model's output; if missing, start and end logits, scores or "
        "sentence embeddings are compared",
    )
    causal: bool | None = option(
        None,
        help="true if position i predicts token i + 1, as in causal LMs; default: decided by the model's class or the "
        "inner one's",
    )

    def __post_init__(self) -> None:
        """Convert a path or a number given as text, then check every option."""
        if isinstance(self.teacher, Path):
            object.__setattr__(self, "teacher", str(self.teacher))
        if isinstance(self.peers, str) and self.peers.strip().isdigit():
            object.__setattr__(self, "peers", int(self.peers))
        super().__post_init__()

    def validate(self) -> None:
        """Check the values of teachers, peers, pairs and layers."""
        for name, rule in self._broken_rules():
            raise self._error(name, rule)
        if self.init_layers is not None and self.init_layers not in ("even", "first", "last"):
            parse_layers(self.init_layers)

    def check_files(self) -> None:
        """Raise an error if a teacher, its function's module, a cache or another student does not exist."""
        for option_name, models in (("teacher", self.teachers), ("peers", self.given_peers)):
            for name in models:
                if isinstance(name, str) and _kind(name) == "NAME":
                    check_named(name, self.key, option_name)
        is_there = self.cache is None or Path(self.cache).is_dir()
        rule = f"teacher must be an existing cache, got {self.teacher!r}"
        require(is_there, self.key, rule, "write it with eff cache-teacher", CheckpointError)

    def _broken_rules(self) -> Iterator[tuple[str, str]]:
        if not self.teachers or not all(map(_is_model, self.teachers)):
            yield "teacher", "must be a folder, a Hub name, a module, or several of them"
        if self.teaching == "NAME,NAME" and any(_kind(teacher) != "NAME" for teacher in self.teachers):
            alone = f"{SELF}, {EMA}, {MUTUAL} and {CACHE}FOLDER work alone"
            yield "teacher", f"must be only models if there are several: {alone}"
        if self.teacher_weights and len(self.teacher_weights) != len(self.teachers):
            yield "teacher_weights", f"must be one number for each of the {len(self.teachers)} teachers"
        peers = self.given_peers or (MUTUAL,) * self.drawn_peers
        if not peers or not all(map(_is_model, peers)):
            yield "peers", "must be the number of students (at least 2), or names or modules of the other students"
        if self.unlabeled_field in ("labels", "input_ids", "attention_mask"):
            yield "unlabeled_field", "must be a separate column"
        for name in ("hidden", "attention"):
            sides = [[side.strip() for side in pair.split("=")] for pair in getattr(self, name)]
            if any(len(pair) != 2 or not all(pair) for pair in sides):
                yield name, "must hold student=teacher pairs of module names"

    @property
    def teaching(self) -> Teaching:
        """The kind of teacher."""
        return _kind(self.teachers[0]) if len(self.teachers) == 1 else "NAME,NAME"

    @property
    def mutual(self) -> bool:
        """True if students teach each other."""
        return self.teaching == MUTUAL

    @property
    def task_weight(self) -> float:
        """Weight of the task loss: `alpha`, or its default."""
        if self.alpha is None:
            return 0.0 if self.teaching == SELF else 0.5
        return self.alpha

    @property
    def has_task(self) -> bool:
        """True if the task loss counts in any step."""
        return bool(self.task_weight or self.alpha_end) or (self.begin, self.end) != (0.0, 1.0)

    @property
    def drawn_peers(self) -> int:
        """Number of other students that start from random weights."""
        return self.peers - 1 if isinstance(self.peers, int) else 0

    @property
    def given_peers(self) -> tuple[Any, ...]:
        """The other students given by the user, as names or modules."""
        if isinstance(self.peers, str):
            return tuple(name.strip() for name in self.peers.split(",") if name.strip())
        if isinstance(self.peers, int):
            return ()
        return tuple(self.peers) if isinstance(self.peers, list | tuple) else (self.peers,)

    @property
    def can_be_chunked(self) -> bool:
        """True if these options allow a chunked loss."""
        return not self.unmet(_CHUNKED)

    @property
    def cache(self) -> str | None:
        """Folder of the cached teacher, or None."""
        return self.teachers[0].removeprefix(CACHE) if self.teaching == "cache:FOLDER" else None

    @property
    def teachers(self) -> tuple[Any, ...]:
        """All teachers, as names or modules."""
        if isinstance(self.teacher, str):
            return tuple(name.strip() for name in self.teacher.split(",") if name.strip())
        return tuple(self.teacher) if isinstance(self.teacher, list | tuple) else (self.teacher,)

    @property
    def why_not_sharded(self) -> str | None:
        """The reason why FSDP2 cannot shard the student, or None."""
        if self.mutual:
            return "teacher mutual also trains other students, which FSDP2 does not shard; use DDP"
        if self.chunked:
            return (
                "chunked reads the head's weight outside its layer's forward, where FSDP2 keeps it sharded; switch "
                "chunked off, or use DDP"
            )
        return None

    @property
    def needs_whole_weights(self) -> bool:
        """True if the options copy the student's weights or read them outside their layers."""
        beside = bool(self.hidden or self.attention or self.init_layers)
        return beside or self.chunked or self.mutual or self.teaching in (SELF, EMA)

    @property
    def works_on_single_examples(self) -> bool:
        """True if the soft term is a mean over single examples and trains only the student's own modules."""
        return not (self.mutual or self.hidden or self.attention or self.chunked or self.unlabeled_field)

    @property
    def of_classes(self) -> bool:
        """True if the outputs are one distribution over classes rather than independent labels or numbers."""
        return self.divergence not in ("logit_mse", "bernoulli_kl")

    def pairs(self, option_name: str) -> list[tuple[str, str]]:
        """Return `hidden` or `attention` as (student module name, teacher module name) pairs."""
        split = [pair.split("=") for pair in getattr(self, option_name)]
        return [(student.strip(), teacher.strip()) for student, teacher in split]

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        if "fsdp2" in environment and self.why_not_sharded:
            yield f"distill cannot be combined with {RUN_ENVIRONMENTS['fsdp2']}: {self.why_not_sharded}"
        if "tensor_parallel" in environment and self.needs_whole_weights:
            yield (
                f"distill with these options cannot be combined with {RUN_ENVIRONMENTS['tensor_parallel']}: "
                "each process sees only parts of weights and outputs; leave out teachers self, ema and mutual, hidden, "
                "attention, init_layers and chunked, or use DDP"
            )
        for way in ("deepspeed_fp16", "lightning_deepspeed"):
            if way in environment and self.needs_whole_weights:
                yield (
                    f"distill with these options cannot be combined with {RUN_ENVIRONMENTS[way]}: the combination is "
                    "untested; leave out teachers self and ema, hidden, attention, init_layers and chunked, or use DDP"
                )
        if self.mutual and "deepspeed" in environment:
            yield (
                f"distill with teacher mutual cannot be combined with {RUN_ENVIRONMENTS['deepspeed']}: its engine "
                "trains only one model; use DDP"
            )
        for key, reason in _NOT_MUTUAL.items():
            if self.mutual and key in recipe:
                yield f"distill with teacher mutual cannot be combined with {key}: {reason}"


def _kind(teacher: Any) -> Teaching:
    if isinstance(teacher, str) and teacher.startswith(CACHE):
        return "cache:FOLDER"
    kinds: dict[str, Teaching] = {SELF: "self", EMA: "ema", MUTUAL: "mutual"}
    return kinds.get(teacher, "NAME") if isinstance(teacher, str) else "NAME"


def _is_model(given: Any) -> bool:
    if isinstance(given, str):
        return bool(given.strip())
    from torch import nn  # imported late: flags and recipes hold only names and need no torch

    return isinstance(given, nn.Module)


def parse_layers(layers: str) -> list[int]:
    """Return the layer numbers of a text such as ``0,2,4``."""
    parts = [part.strip() for part in layers.split(",")]
    if not all(part.isdecimal() for part in parts):
        rule = f"init_layers must be even, first, last, or numbers separated by commas such as 0,2,4, got {layers!r}"
        raise ConfigError("distill", rule)
    return [int(part) for part in parts]
