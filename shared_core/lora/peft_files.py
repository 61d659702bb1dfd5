"""Adapters in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`, which load without this library."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shared_core.checkpoint_formats.adapter import ADAPTER_CONFIG, KEY_PREFIX, lora_layers, open_adapter, scaling
from shared_core.checkpoint_formats.files import read_json
from shared_core.checkpoint_formats.plain import CARD
from shared_core.distributed.sharded_tensors import whole
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.files.atomic import atomic_write, make_folder
from shared_core.libraries import optional
from shared_core.lora.adapters import are_translated
from shared_core.lora.config import LoraConfig
from shared_core.lora.quantized_base import on_grid
from shared_core.modules.matching import conv1d_of, plain_name
from shared_core.modules.weight_views import as_rows, from_rows

WEIGHTS = "adapter_model.safetensors"
BASE_FILE = "eff_adapters.json"
_MERGED = "write --lora_save merged"
# PEFT's classes for these tasks add generation or a head; it knows other classes by their names.
_TASKS = {"ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
_HEADED = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
_HEADS = ("classifier", "score")


class AdapterFiles:
    """The adapters of a model, and the modules that are trained whole, as PEFT saves them.

    Args:
        layout: Their names and config.
        tensors: PEFT's names and values.
        digests: Of the frozen weights under the adapters, by layer, where these are as the user loaded them.
    """

    name: ClassVar[str] = "adapters"

    def __init__(self, layout: Layout, tensors: dict[str, Tensor], digests: Mapping[str, str]) -> None:
        self._layout, self._tensors, self._digests = layout, tensors, digests

    def write(self, folder: Path) -> None:
        """Write weights, their config, what `eff` needs of the base and, if there is none, a card."""
        make_folder(folder)
        with atomic_write(folder / WEIGHTS) as temporary:
            save_file({key: value.contiguous() for key, value in self._tensors.items()}, temporary, {"format": "pt"})
        with atomic_write(folder / ADAPTER_CONFIG) as temporary:
            text = json.dumps(self._layout.config(), indent=2, sort_keys=True)
            temporary.write_text(text + "\n", encoding="utf-8")
        with atomic_write(folder / BASE_FILE) as temporary:
            temporary.write_text(json.dumps(self._layout.of_base(self._digests), indent=2) + "\n", encoding="utf-8")
        if not (folder / CARD).exists():
            self._layout.write_card(folder / CARD)

    def differences(self, folder: Path) -> list[str]:
        """Return which tensors or factors in a folder's files differ from these, one line each."""
        saved, lines = open_adapter(folder), []
        for key in sorted({*self._tensors, *saved.specs}):
            if key not in self._tensors or not saved.has(key):
                lines.append(f"lora: {key} {'is not there' if key in self._tensors else 'should not be there'}")
            elif not torch.equal(saved.tensor(key), self._tensors[key].cpu()):
                lines.append(f"lora: {key}: it differs from the end of training")
        for layer in lora_layers(saved):
            factor = scaling(saved.config, layer.module)
            if factor != self._layout.options.scale:
                lines.append(f"lora: {layer.module}: its factor is {factor}, it should be {self._layout.options.scale}")
        return lines


class Layout:
    """The names that PEFT gives to adapters and whole modules, and the config that makes it find them.

    Args:
        model: The user's, with or without adapters in it.
        layers: Names of the adapted layers.
        modules: Names of the modules that are saved whole.
        options: The adapters' options.

    Raises:
        CompatibilityError: If PEFT would find other layers or modules by these names.
    """

    def __init__(self, model: nn.Module, layers: Collection[str], modules: Iterable[str], options: LoraConfig) -> None:
        self.options, self._layers = options, list(layers)
        outermost = _without_inner(modules)
        self._prefix, self._root = _transformers_model(model, [*layers, *outermost])
        cut = len(self._prefix)
        self._adapted = {name[cut:] for name in layers}
        inside = tuple(f"{name}." for name in self._adapted)
        names = [plain_name(name) for name, _ in self._root.named_modules(remove_duplicate=False) if name]
        # Of adapted layers the children are PEFT's.
        self._names = [name for name in names if not name.startswith(inside)]
        wanted = {name[cut:] for name in outermost}
        # PEFT saves every module whose name ends so.
        self._whole = sorted(name for name in self._names if any(name.endswith(one) for one in wanted))
        self._modules = [f"{self._prefix}{name}" for name in self._whole]
        self._targets = self._find_targets()

    def _find_targets(self) -> list[str] | str:
        if "" in self._adapted or any(
            name.startswith(f"{one}.") or name == one for one in self._whole for name in self._adapted
        ):
            rule = "PEFT matches modules by name, and cannot tell these adapters from the modules trained in full"
            raise CompatibilityError("lora", rule, f"{_MERGED}, or leave modules out with --lora_train")
        last = sorted({name.rpartition(".")[2] for name in self._adapted})
        exact = "|".join(re.escape(name) for name in sorted(self._adapted))
        for targets in (last, sorted(self._adapted), exact):
            if self._found(targets) == self._adapted and not are_translated(self._peft_config(targets), self._root):
                return targets
        rule = "PEFT matches layers by name, and would find other layers than the adapted ones"
        raise CompatibilityError("lora", rule, _MERGED)

    def _found(self, targets: list[str] | str) -> set[str]:
        from peft.tuners.tuners_utils import check_target_module_exists

        asked = self._peft_config(targets)
        # An excluded module counts as found in PEFT's answer, which is an object for it.
        found = {name: check_target_module_exists(asked, name) for name in self._names}
        return {name for name, answer in found.items() if answer and "Excluded" not in type(answer).__name__}

    def _peft_config(self, targets: list[str] | str) -> Any:
        peft = optional("peft", "lora", "lora")
        options, kinds = self.options, conv1d_of(self._root)
        named = self._root.named_modules()
        layers = [getattr(one, "user_layer", one) for name, one in named if plain_name(name) in self._adapted]
        return peft.LoraConfig(
            r=options.rank,
            lora_alpha=int(options.alpha) if options.alpha.is_integer() else options.alpha,
            lora_dropout=options.dropout,
            target_modules=targets,
            modules_to_save=self._whole or None,
            fan_in_fan_out=all(isinstance(one, kinds) for one in layers),
            task_type=self._task(),
            inference_mode=True,
        )

    def _task(self) -> str | None:
        kind = type(self._root).__name__
        heads = {name.rpartition(".")[2] for name in self._whole}
        tasks = _TASKS | (_HEADED if heads & {*_HEADS} else {})
        return next((task for ending, task in tasks.items() if kind.endswith(ending)), None)

    def config(self) -> dict[str, Any]:
        """Return what `adapter_config.json` holds."""
        values: dict[str, Any] = self._peft_config(self._targets).to_dict()
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
        values["base_model_name_or_path"] = self.base
        if values["task_type"] is None:
            kind = type(self._root)
            values["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        return values

    @property
    def base(self) -> str | None:
        """The folder or name on the Hub that the base was loaded from, None if nothing tells it."""
        name = str(getattr(getattr(self._root, "config", None), "_name_or_path", "") or "")
        return (os.path.abspath(name) if os.path.isdir(name) else name) or None

    def of_base(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return how the base was rounded, the config of a model of transformers, and digests of weights by layer."""
        # No config.json: transformers takes a folder with one for a whole model. Labels of a new head are here alone.
        config: Any = copy.deepcopy(getattr(self._root, "config", None))
        values = None
        if hasattr(config, "to_json_string"):
            config.architectures = [type(self._root).__name__]
            values = json.loads(config.to_json_string(use_diff=False))
        return {
            "base": self.options.base,
            "double_quant": self.options.double_quant,
            "config": values,
            "digests": {name[len(self._prefix) :]: found for name, found in digests.items()},
        }

    def write_card(self, file: Path) -> None:
        """Write a model card that says what PEFT's does."""
        base = f"base_model: {self.base}\n" if self.base and not os.path.isabs(self.base) else ""
        with atomic_write(file) as temporary:
            text = f"---\n{base}library_name: peft\ntags:\n- lora\n---\n\n# Model card\n"
            temporary.write_text(text, encoding="utf-8")

    def files(
        self,
        matrices: Mapping[str, tuple[Tensor, Tensor]],
        state: Mapping[str, Tensor],
        digests: Mapping[str, str],
    ) -> AdapterFiles:
        """Return the files of adapters, by layer, and of the whole modules in a model's state dict.

        Every process must call it if tensors are sharded.
        """
        tensors: dict[str, Tensor] = {}
        for name, (a, b) in matrices.items():
            stem = f"{KEY_PREFIX}{name[len(self._prefix) :]}"
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b
        for name, value in self.own(state):
            tensors[f"{KEY_PREFIX}{name[len(self._prefix) :]}"] = value
        copies = {key: whole(value.detach()).to("cpu", copy=True) for key, value in tensors.items()}
        return AdapterFiles(self, copies, digests)

    def own(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of whole modules in a state dict, by plain name."""
        tops = tuple(f"{name}." for name in self._modules)
        for name, value in state.items():
            if isinstance(value, Tensor) and plain_name(name).startswith(tops):
                yield plain_name(name), value

    def read(self, folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Return the adapters by layer, and the tensors of whole modules, in a folder that `AdapterFiles` wrote.

        Raises:
            CheckpointError: If they are not those of these layers.
        """
        saved = open_adapter(folder)
        found = {f"{self._prefix}{layer.module}": layer for layer in lora_layers(saved)}
        if odd := sorted({*found} ^ {*self._layers}):
            rule = f"adapters must be of the layers of this run, but these differ: {', '.join(odd[:3])}"
            raise CheckpointError(folder, rule, "resume with the options of the saved run")
        matrices = {name: (saved.tensor(layer.a), saved.tensor(layer.b)) for name, layer in found.items()}
        used = {key for layer in found.values() for key in (layer.a, layer.b)}
        others = [key for key in saved.specs if key not in used]
        return matrices, {f"{self._prefix}{key.removeprefix(KEY_PREFIX)}": saved.tensor(key) for key in others}


def _without_inner(names: Iterable[str]) -> list[str]:
    """Return names without those that lie inside another."""
    found = sorted({*names})
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _transformers_model(model: nn.Module, names: list[str]) -> tuple[str, nn.Module]:
    """Return the prefix and the outermost model of transformers that holds all modules, else the model itself."""
    for path, module in model.named_modules():
        prefix = f"{plain_name(path)}." if path else ""
        is_one = hasattr(module, "save_pretrained") and hasattr(getattr(module, "config", None), "model_type")
        if is_one and all(name.startswith(prefix) for name in names):
            return prefix, module
    return "", model


_WORDS = 2**22


def digest(tensor: Tensor) -> str:
    """Return a text that tensors of other bits, type or shape do not share; it is computed where the tensor lies."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(8 * _WORDS):  # type: ignore[no-untyped-call]
        words = nn.functional.pad(part, (0, -len(part) % 8)).clone().view(torch.int64)
        # Odd factors keep every bit of a word, and tell places apart; integers wrap around in any order of the sum.
        factors = torch.arange(1, 2 * len(words) + 1, 2, device=words.device)
        total = total * 1_000_003 + (words * factors).sum()
    return f"{tensor.dtype} {list(tensor.shape)} {int(total):x}"


def read_base(folder: Path) -> dict[str, Any]:
    """Return what `AdapterFiles` wrote of the base into a folder; empty for adapters that PEFT saved."""
    return dict(read_json(folder / BASE_FILE)) if (folder / BASE_FILE).is_file() else {}


@torch.no_grad()
def merge_(base: nn.Module, folder: Path) -> nn.Module:
    """Return the base model with the adapters in a folder merged; where they were trained on codes, on these codes."""
    peft = optional("peft", "lora", "lora")
    saved = read_base(folder)
    for name, found in saved.get("digests", {}).items():
        mine, kept = digest(base.get_submodule(name).weight), str(found)  # type: ignore[arg-type]
        # Loaded in another type it is not compared.
        if mine != kept and mine.split()[0] == kept.split()[0]:
            rule = f"base model must be the one that the adapters were trained on, but its {name} has other weights"
            raise CheckpointError(folder, rule, f"{name} may be new in the trained model; {_MERGED} next time")
    if saved.get("base", "none") != "none":
        options = LoraConfig(rank=1, base=saved["base"], double_quant=saved["double_quant"])
        for layer in lora_layers(open_adapter(folder)):
            module: Any = base.get_submodule(layer.module)
            rounded = on_grid(as_rows(module, module.weight.detach()), options)
            module.weight.data = from_rows(module, rounded, module.weight.data)
    merged: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return merged
