"""The adapter of a PEFT model in training, replaced by averages of other ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.soup.adapter_average import RANK_FIELDS, AdapterWeights
from shared_core.soup.sources import ADAPTER, Ingredient, open_ingredient
from shared_core.soup.sources.adapter import ADAPTER_CONFIG, check_adapters, rank_and_alpha, scaling


def adapter_of(model: nn.Module) -> PeftAdapter | None:
    """Return the adapter of the PEFT model that this is, or has in it; None if it has none.

    Raises:
        CompatibilityError: If there are several, or PEFT's layers stand in a model of another class.
        CheckpointError: If averages of it would not be those of what it adds to the base model.
    """
    peft = sys.modules.get("peft")  # without it there is no such model
    found = [] if peft is None else [
        (name, module) for name, module in model.named_modules() if isinstance(module, peft.PeftModel)
    ]  # fmt: skip
    if not found:
        odd = next((name for name, module in model.named_modules() if hasattr(module, "lora_A")), None)
        if odd is not None:
            raise CompatibilityError(
                f"soup: adapters must be those of a PeftModel, got PEFT's layer {odd!r} in {type(model).__name__}, and "
                "averaging A and B apart is not averaging BA; make the model by peft.get_peft_model"
            )
        return None
    if len(found) > 1:
        raise CompatibilityError(
            f"soup: model must hold one PeftModel, got {', '.join(repr(name) for name, _ in found)}; average their "
            "saved adapters with `eff soup`, each model's for itself"
        )
    return PeftAdapter(model, *found[0])


class PeftAdapter:
    """Reads and replaces the one adapter of a PEFT model, and what else of the model its checkpoints hold.

    Args:
        model: The user's model.
        name: Where in it the PEFT model is, ``""`` if it is that itself.
        peft_model: The PEFT model.
    """

    def __init__(self, model: nn.Module, name: str, peft_model: Any) -> None:
        self._model, self._peft = model, peft_model
        self._prefix = f"{name}." if name else ""
        # Lightning's checkpoints hold these too, PEFT's own do not
        inner = [key for key, _ in peft_model.named_buffers()] if name else []
        self._outer = [
            key
            for key in model.state_dict()
            if not key.startswith(self._prefix) or key.removeprefix(self._prefix) in inner
        ]
        names = list(peft_model.peft_config)
        if len(names) != 1:
            raise CompatibilityError(f"soup: PEFT model must have one adapter, got {names}; delete the others")
        self._name: str = names[0]
        kind = str(getattr(self._config.peft_type, "value", self._config.peft_type))
        if kind != "LORA" or self._config.is_prompt_learning:
            raise CompatibilityError(
                f"soup: PEFT model must have a LoRA adapter, got {kind}, whose averages are not those of what it does; "
                "leave soup out"
            )
        present = Ingredient("the model's adapter", ADAPTER, None, self.weights, self.fields())
        check_adapters(present, present)

    @property
    def _config(self) -> Any:
        return self._peft.peft_config[self._name]

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``adapter_config.json``."""
        fields = self._config.to_dict()
        return {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}

    def weights(
        self, state_dict: Mapping[str, Tensor] | None = None, like: Ingredient | None = None
    ) -> dict[str, Tensor]:
        """Return the adapter under PEFT's names, and what else checkpoints hold.

        Args:
            state_dict: The whole model's; by default the present one, whose tensors are not copied.
            like: Has the names to return: PEFT also saves embeddings that were resized.
        """
        from peft import get_peft_model_state_dict

        whole = self._model.state_dict() if state_dict is None else state_dict
        inner = {key.removeprefix(self._prefix): value for key, value in whole.items() if key.startswith(self._prefix)}
        # by itself it may ask the Hub whether the base model's vocabulary has changed
        found = get_peft_model_state_dict(
            self._peft, state_dict=dict(inner), adapter_name=self._name, save_embedding_layers=False
        )
        more = {} if like is None else {key: inner[key] for key in like.specs if key in inner}
        return {**found, **more, **{key: whole[key] for key in self._outer}}

    def ingredient(self, path: Path, load: Callable[[], Mapping[str, Tensor]]) -> Ingredient:
        """Return the adapter in a checkpoint of this run.

        Args:
            path: The checkpoint.
            load: Returns the weights of the whole model, where the checkpoint is none of PEFT's own.
        """
        folder = path if self._name == "default" else path / self._name
        if (folder / ADAPTER_CONFIG).is_file():
            return open_ingredient(folder)
        return Ingredient(str(path), ADAPTER, path, lambda: self.weights(load()), self.fields())

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Give the model this adapter, of whatever rank; parameters of a new shape are new ones.

        Args:
            weights: `AdapterWeights`.
        """
        from peft import set_peft_model_state_dict

        fields, name = cast(AdapterWeights, weights).config, self._name
        for path, layer in self._peft.named_modules():
            if name in getattr(layer, "lora_alpha", ()):
                module = path.removeprefix("base_model.model.")
                layer.r[name], layer.lora_alpha[name] = rank, _ = rank_and_alpha(fields, module)
                layer.scaling[name] = scaling(fields, module)
                _resize(layer, name, rank)
        for field in RANK_FIELDS:
            setattr(self._config, field, fields.get(field))
        set_peft_model_state_dict(self._peft, {k: v for k, v in weights.items() if k not in self._outer}, name)
        own = self._model.state_dict()
        for key in self._outer:
            own[key].copy_(weights[key])


def _resize(layer: Any, name: str, rank: int) -> None:
    for holder, dimension in (("lora_A", 0), ("lora_B", 1)):
        if name in getattr(layer, holder):
            inner = getattr(layer, holder)[name]
            _set_rank(inner, "weight", inner.weight, dimension, rank)
            kind = "features" if hasattr(inner, "out_features") else "channels"
            setattr(inner, f"{('out', 'in')[dimension]}_{kind}", rank)
        embedding = getattr(layer, holder.replace("_", "_embedding_"), {})
        if name in embedding:
            _set_rank(embedding, name, embedding[name], dimension, rank)


def _set_rank(holder: Any, name: str, old: Tensor, dimension: int, rank: int) -> None:
    shape = (*old.shape[:dimension], rank, *old.shape[dimension + 1 :])
    if shape != tuple(old.shape):
        setattr(holder, name, nn.Parameter(old.new_empty(shape), requires_grad=old.requires_grad))
