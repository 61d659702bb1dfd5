"""Distillation in the Trainer: unlabeled examples and their column, losses of other models, teachers.

A teacher comes from a folder or the Hub, with the class that its config names. Its files must hold every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_eff._adapters import Adapter
from hf_eff._adapters.trainers import fuses_head, loss_of_trl
from hf_eff._run_environment import is_peft
from shared_core.checkpoint_formats.adapter import ADAPTER_CONFIG, KEY_PREFIX, is_adapter_folder, open_adapter
from shared_core.checkpoint_formats.files import read_json
from shared_core.checkpoint_formats.opening import is_bare_weights, teacher_from_weights
from shared_core.checkpoint_formats.plain import check_values
from shared_core.checkpoint_formats.released import saved_dequantized
from shared_core.checkpoint_formats.saved_rows import save_as_float_
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, first_line, require
from shared_core.files.hub_names import check_named
from shared_core.files.json_yaml import parse_json
from shared_core.front_ends.session import Session

_SECONDS = 10  # for the Hub to answer
_NO_LABELS = torch.empty(0, dtype=torch.int64)
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT")
_TOKEN_TASKS = ("CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS")


class Distillation(Adapter):
    """Selects the positions that the soft term counts, and hides from the Trainer what it would reject."""

    key = "distill"

    def join(self, session: Session) -> None:
        """Record whether a term is added to the task loss."""
        super().join(session)
        options = session.recipe["distill"].to_dict() if "distill" in session.recipe else {}
        self._window.adds_term, self._window.lacks_logits = bool(options), bool(options.get("chunked"))
        self._window.causal, self._window.term_positions = False, None

    def around(self) -> dict[str, Callable[..., Any]]:
        """Hide the column that marks unlabeled examples from the model, and clip peers by their own norms."""
        return {
            "get_batch_samples": self._batches,
            "_set_signature_columns_if_needed": self._keep_column,
            "_prepare_inputs": self._prepare,
            "_clip_grad_norm": self._clip,
        }

    @property
    def field(self) -> str | None:
        """The column that marks unlabeled examples, if there is one."""
        field: str | None = self.technique.config.unlabeled_field
        return field

    def check_data(self) -> None:
        """Raise `ConfigError` if the training data lack the column, as far as visible without reading them."""
        data: Any = self._trainer.train_dataset
        if self.field is None:
            return
        columns = getattr(data, "column_names", None)
        if columns is None and isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
            columns = list(data[0])
        rule = remedy = ""
        if isinstance(columns, list) and self.field not in columns:
            rule, remedy = "a column of the training data", f"they have {', '.join(columns)}"
        elif (names := self._trainer.label_names) and "labels" not in names:
            rule = f"none where labels are called {', '.join(names)}, not labels"
        if rule:
            raise ConfigError("distill", f"unlabeled_field must be {rule}, got {self.field!r}", remedy)

    def _keep_column(self, method: Callable[..., None]) -> None:
        """Add the column to those that the trainer keeps."""
        method()
        columns = self._trainer._signature_columns
        if self.field is not None and columns is not None and self.field not in columns:
            columns.append(self.field)

    def _prepare(self, method: Callable[..., Any], inputs: Any) -> Any:
        """Return inputs as the model takes them. In training, labels of unlabeled examples are removed."""
        inputs = method(inputs)
        if self.field is None or self._trainer.model is None:
            return inputs
        if self._trainer.model.training and self.session.is_attached:
            return self.technique.prepare_batch(inputs)
        return {name: value for name, value in inputs.items() if name != self.field}

    def _batches(
        self, method: Callable[..., Any], batches: Iterator[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], Any]:
        """Return a window's micro-batches and the trainer's label count. Record what the soft term counts."""
        window, num_items = method(map(self._countable, batches), *args, **kwargs)
        window = [
            {name: value for name, value in batch.items() if value is not _NO_LABELS}
            if isinstance(batch, Mapping) and batch.get("labels") is _NO_LABELS
            else batch
            for batch in window
        ]
        if isinstance(num_items, Tensor):
            num_items = num_items.clamp(min=1)  # a window without labels would divide its sum of 0 by 0
        self._window.causal, self._window.term_positions = self.technique.is_causal, self._positions(window)
        return window, num_items

    def _countable(self, batch: Any) -> Any:
        """Return a batch with the labels that the loss will see, since the trainer counts them earlier."""
        if not isinstance(batch, Mapping):
            return batch
        if self.lacks_labels(batch):
            # transformers (5.23) checks only the first batch to decide if labels can be counted
            return {**batch, "labels": _NO_LABELS}
        if self.field is None:
            return batch
        prepared = self.technique.prepare_batch(batch)
        if prepared["labels"].is_floating_point() and self._trainer.compute_loss_func is None:
            raise ConfigError(
                "distill",
                f"unlabeled_field {self.field!r} needs class indices as labels, or a compute_loss_func "
                f"that ignores NaN labels, got {prepared['labels'].dtype}",
            )
        return {**prepared, self.field: batch[self.field]}

    def lacks_labels(self, batch: Mapping[str, Any]) -> bool:
        """Return True if a batch has no labels although the model takes them."""
        return "labels" in self._trainer.label_names and batch.get("labels") is None

    def _positions(self, window: list[Any]) -> Tensor | None:
        trainer, distillation = self._trainer, self.technique
        if "labels" not in trainer.label_names and any(batch.get("labels") is None for batch in window):
            return None  # labels have another name, or are missing
        count = torch.zeros((), dtype=torch.int64, device=trainer.args.device)
        for batch in window:
            count += distillation.positions_ahead(batch).to(count.device)
        return count

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss; 0 for a batch without labels if the model returns no loss."""
        distillation, whole = self.technique, dict(inputs)
        self._services.compute_loss = lambda other: method(other, dict(whole), *args, **kwargs)
        distillation.labels = inputs.get("labels")  # label smoothing and compute_loss_func remove them
        if not self.lacks_labels(inputs):
            return method(model, inputs, *args, **kwargs)
        distillation.prepare_batch(inputs)
        output = model(**inputs)
        own = output.get("loss") if isinstance(output, Mapping) else None
        if own is None:
            return distillation.unlabeled_task(output)
        return own if self._window.divides else own / self._trainer.current_gradient_accumulation_steps

    def _clip(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        norm = method(model, *args, **kwargs)
        for peer in self.technique.peers:
            method(peer, *args, **kwargs)  # each by its own norm, so that peers do not affect the student's step
        return norm

    def check(self) -> None:
        """Raise an error if the trainer or model computes no logits, or other logits than those of the batch."""
        owner, config = loss_of_trl(self._trainer), self.technique.config
        if owner == "RewardTrainer" and config.divergence != "logit_mse":
            rule = (
                f"divergence must be logit_mse with TRL's RewardTrainer, which has one score, got {config.divergence}"
            )
            raise ConfigError("distill", rule)
        if owner in (None, "SFTTrainer", "RewardTrainer"):
            self.technique.fuses_head = fuses_head(self._trainer)
        for rule, remedy in self._misfits(owner):
            raise CompatibilityError("distill", rule, remedy)

    def _misfits(self, owner: str | None) -> Iterator[tuple[str, str]]:
        """Yield what does not work with a soft term: some TRL losses, PEFT prompts, missing logits."""
        trainer, config = self._trainer, self.technique.config
        fuses, chunked = self.technique.fuses_head, self._window.lacks_logits
        if owner not in (None, "SFTTrainer", "RewardTrainer"):
            own = hasattr(trainer, "teacher_model")
            yield (
                f"trainer must train on labels, as TRL's SFTTrainer does, got {owner}, "
                + ("which has its own teacher" if own else "whose loss scores whole completions"),
                "leave distill out" + ("" if own else ", or distill with SFTTrainer first"),
            )
        if fuses and (config.mutual or config.student is not None):
            yield (
                "teacher must not be mutual and student must be unset with TRL's SFTTrainer, whose loss needs one "
                f"whole model, got {'mutual' if config.mutual else config.student}",
                "train with transformers' own Trainer",
            )
        if fuses and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            got = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
            yield f"TRL's SFTTrainer must keep the head's weight whole for the soft term, got {got}", "use DDP"
        prompts = getattr(trainer.model, "active_peft_config", None) if is_peft(trainer.model) else None
        if prompts is not None and prompts.peft_type in _PROMPTS and prompts.task_type in _TOKEN_TASKS:
            yield (
                f"logits must be those of the batch's tokens, but PEFT's {prompts.peft_type.value} adds "
                f"{prompts.num_virtual_tokens} tokens before them, which no teacher sees",
                "use prefix tuning or LoRA",
            )
        if chunked and trainer.label_smoother is not None:
            yield (
                f"label_smoothing_factor must be 0 with chunked, got {trainer.args.label_smoothing_factor}: the "
                "trainer smooths the log-probabilities of all classes, which chunked does not compute",
                "drop one of the two",
            )
        if (chunked or fuses) and trainer.args.torch_compile:
            yield (
                "torch_compile must be False with chunked and TRL's SFTTrainer, got True: a compiled head computes "
                "logits",
                "drop one of the two",
            )


def load_teacher(
    name: str, student: nn.Module, *, trust_remote_code: bool = False, dequantize: bool = False
) -> nn.Module:
    """Return the model saved under `name`, on the student's device. Random numbers are not affected.

    Args:
        name: A folder that a trainer or ``save_pretrained`` wrote, or a name on the Hub. A folder without config.json
            and a ``.safetensors`` file hold an earlier state of the student.
        student: Gives the device, and the class if the config names none or the student is a sentence-transformers
            model.
        trust_remote_code: Run the code that comes with the weights (``auto_map`` in ``config.json``).
        dequantize: Load quantized weights as float ones.
    """
    composed = _is_composed(student)
    if is_bare_weights(Path(name).expanduser()) and not composed:
        return teacher_from_weights(Path(name).expanduser(), student)
    if is_adapter_folder(Path(name).expanduser()):
        return _with_adapters(Path(name).expanduser(), student, trust_remote_code, dequantize)
    return _loaded(name, student, trust_remote_code=trust_remote_code, dequantize=dequantize)


def _with_adapters(folder: Path, student: nn.Module, trust_remote_code: bool, dequantize: bool) -> nn.Module:
    """Return the base model that a PEFT adapter folder names, with the adapters merged."""
    from shared_core.lora.peft_files import merge_, read_base  # imports all of quantization

    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base:
        rule = f"{ADAPTER_CONFIG} must name the base model in base_model_name_or_path, got none"
        line = 'save PeftModel.from_pretrained(model, FOLDER).merge_and_unload(), or train with "--lora_save merged"'
        raise CheckpointError(folder, rule, line)
    values = read_base(folder).get("config")
    config = AutoConfig.for_model(**values) if values else None
    provided = [key.removeprefix(KEY_PREFIX) for key in open_adapter(folder).specs]
    model = _loaded(
        base, student, trust_remote_code=trust_remote_code, config=config, provided=provided, dequantize=dequantize
    )
    return merge_(model, folder)


def _loaded(
    name: str,
    student: nn.Module,
    *,
    trust_remote_code: bool,
    config: Any = None,
    provided: Collection[str] = (),
    dequantize: bool = False,
) -> nn.Module:
    """Return the model in a folder or under a Hub name.

    Args:
        name: As for `load_teacher`.
        student: As for `load_teacher`.
        trust_remote_code: As for `load_teacher`.
        config: Used instead of the one in the folder.
        provided: Weights that may be missing from its files or have another shape there.
        dequantize: As for `load_teacher`.
    """
    composed = _is_composed(student)
    _check_path(name, "config.json", *(["modules.json"] if composed else ()))
    device = next((parameter.device for parameter in student.parameters()), torch.device("cpu"))
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            if composed:
                return _composed_teacher(name, student, trust_remote_code).to(device)
            # always given: otherwise transformers would prompt on the terminal
            if config is None:
                config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            elif how := type(config).get_config_dict(name)[0].get("quantization_config"):
                config.quantization_config = {**how, "dequantize": True}  # adapters were trained on float weights
            if dequantize and isinstance(getattr(config, "quantization_config", None), dict):
                config.quantization_config["dequantize"] = True
            teacher, loading = _class_of(config, student, name, trust_remote_code).from_pretrained(
                name, config=config, output_loading_info=True, ignore_mismatched_sizes=bool(provided),
                **(renamed := _names_of_dequantized(name, config)),
            )  # fmt: skip
        except CheckpointError:
            raise
        except Exception as error:  # transformers, safetensors and the Hub client each raise their own
            if not trust_remote_code and _TRUST in str(error):
                raise _untrusted(name) from error
            rule = f"teacher must be a readable model folder or Hub name, got {name!r}: {first_line(error)}"
            raise CheckpointError("distill", rule) from error
    absent = {*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])}
    lacking = sorted(absent - {*provided})
    if lacking:
        rule = f"teacher's files lack weights: {name!r} has no {lacking[0]} ({len(lacking)} missing)"
        raise CheckpointError("distill", rule, "it would teach from random weights")
    check_values(teacher, dict(teacher.named_parameters()), f"distill: teacher {name!r}")
    if renamed:
        vars(teacher).pop("_weight_conversions", None)  # otherwise it would be saved under these names again
    save_as_float_(teacher)
    return teacher.to(device)  # type: ignore[no-any-return]


def _names_of_dequantized(name: str, config: Any) -> dict[str, Any]:
    """Return options with which transformers reads a folder that it saved after dequantizing the model on loading."""
    how = saved_dequantized(Path(name).expanduser())
    if how == "fp8":
        config.quantization_config = {"quant_method": "fp8", "dequantize": True}
    return {"key_mapping": {"_blocks$": ""}} if how == "mxfp4" else {}


def empty_model(name: str) -> nn.Module:
    """Return the model that a folder's config describes, in the dtype of its weights, on the meta device."""
    _check_path(name, "config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # otherwise it prompts on the terminal
    except Exception as error:  # transformers and the Hub client each raise their own
        rule = f"teacher must have a readable config.json, got {name!r}: {first_line(error)}"
        raise CheckpointError("distill", rule) from error
    with torch.device("meta"):
        model: nn.Module = _class_of(config, nn.Module(), name, False)._from_config(config)
    return model.to(config.dtype) if isinstance(config.dtype, torch.dtype) else model


def _is_composed(student: nn.Module) -> bool:
    """Return True if the student is a sentence-transformers model: several modules, listed in ``modules.json``."""
    return any(kind.__module__.startswith("sentence_transformers.") for kind in type(student).__mro__)


def _composed_teacher(name: str, student: Any, trust_remote_code: bool) -> nn.Module:
    """Return a model of the student's class from a sentence-transformers folder or the Hub."""
    path, kind = Path(name).expanduser(), type(student)
    ours = getattr(student, "model_type", kind.__name__)
    written = path / "config_sentence_transformers.json"
    content: Any = parse_json(written.read_text(encoding="utf-8")) if written.is_file() else {}
    if (theirs := content.get("model_type", ours)) != ours:
        rule = f"teacher must be a {ours} as the student is, got {name!r}, which is a {theirs}"
        raise CheckpointError("distill", rule)
    if ours == "CrossEncoder" and not (path / "modules.json").is_file():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if not any("SequenceClassification" in one for one in config.architectures or ()):  # its head would be random
            rule = f"teacher must be a {ours}, got {name!r} of {config.architectures}"
            raise CheckpointError("distill", rule, "it would teach from random weights")
    device = next((str(parameter.device) for parameter in student.parameters()), "cpu")
    place = str(path) if path.exists() else name
    teacher: nn.Module = kind(place, device=device, trust_remote_code=trust_remote_code)
    return teacher


def _check_path(name: str, *files: str) -> None:
    path = Path(name).expanduser()
    is_whole = not path.exists() or any((path / file).is_file() for file in files)
    rule = f"teacher must be a folder with {' or '.join(files)}, but {name!r} has none"
    require(is_whole, "distill", rule, "pass the folder that save_model or save_pretrained wrote", CheckpointError)
    check_named(name, "distill", "teacher")
    if not path.exists() and not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        _check_hub(name)


def _check_hub(name: str) -> None:
    """Check once that the Hub answers: transformers would retry for half a minute."""
    try:
        HfApi().model_info(name, timeout=_SECONDS)
    except HfHubHTTPError:
        pass  # it answers: transformers reports why it rejects the model
    except Exception as error:  # of the client's HTTP library, which depends on the version
        rule = f"teacher must be an existing folder or a Hub name, got {name!r}: there is no such folder, and the Hub "
        raise CheckpointError("distill", f"{rule}cannot be reached ({first_line(error)})", "check the path") from error


_TRUST = "trust_remote_code"  # the name in transformers' error


def _untrusted(name: str) -> CheckpointError:
    return CheckpointError(
        "distill",
        f"teacher must have a class of transformers, but the config.json of {name!r} names its own code (auto_map)",
        "the code was not run. Read it, then set distill.trust_remote_code: true (--distill_trust_remote_code; eff "
        "cache-teacher --trust-remote-code), or load the model yourself and pass the object",
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
    # a user's own model class is not an attribute of transformers
    kind = type(student)
    if hasattr(kind, "from_pretrained") and kind.__name__ in (config.architectures or [kind.__name__]):
        return kind
    if own:
        raise _untrusted(name)
    rule = f"teacher's config must name a class of transformers, got {config.architectures!r} in {name!r}"
    raise CheckpointError("distill", rule, "load it yourself and pass the object")
