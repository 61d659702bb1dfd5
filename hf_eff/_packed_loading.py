"""Let transformers load GPTQ and AWQ models in float where gptqmodel, which it needs for their codes, is missing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shared_core.errors import CheckpointError
from shared_core.libraries import installed_version


def load_packed_in_float(quantizers: ModuleType) -> None:
    """Make ``from_pretrained`` dequantize GPTQ and AWQ models, unless gptqmodel is installed.

    Args:
        quantizers: ``transformers.quantizers.auto``.

    Example:
        ``load_packed_in_float(transformers.quantizers.auto)``
    """
    if installed_version("gptqmodel") is None:
        for method in ("gptq", "awq"):
            quantizers.AUTO_QUANTIZER_MAPPING[method] = _quantizer


def _quantizer(quantization_config: Any, **options: Any) -> Any:
    """Return a quantizer of transformers that only dequantizes."""
    # Not imported above: commands that load no model stay fast.
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.base import HfQuantizer

    from shared_core.checkpoint_formats.packed_layouts import NAMES, PackedLayout

    class Dequantize(ConversionOps):
        """Codes, scales and zero points of a layer → its weight."""

        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **about: Any
        ) -> dict[str, Any]:
            """Return the weight in the model's dtype."""
            name, model = about["full_layer_name"], about["model"]
            parts = {part: value[0] if isinstance(value, list) else value for part, value in input_dict.items()}
            weight = PackedLayout(name, {}, _as_dict(quantization_config)).read(parts).values
            return {name: weight.to(model.get_parameter(name).dtype)}

    class Quantizer(HfQuantizer):  # type: ignore[misc]
        """Loads a GPTQ or AWQ model in float."""

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            stacked = [name for name, value in model.named_parameters() if value.ndim == 3 and "experts" in name]
            if stacked:
                rule = f"layers of a {quantization_config.quant_method.value} model must be nn.Linear, got {stacked[0]}"
                raise CheckpointError("released", rule, "install gptqmodel to load mixtures of experts")
            return model

        def get_weight_conversions(self) -> list[Any]:
            return [WeightConverter([*NAMES], "weight", [Dequantize(self)])]

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    PackedLayout("model", {}, _as_dict(quantization_config))  # refuses other formats before files are read
    quantization_config.dequantize = True
    return Quantizer(quantization_config, **options)


def _as_dict(config: Any) -> dict[str, Any]:
    """Return a config of transformers with the keys of ``config.json``."""
    values = dict(vars(config))
    method, format = values["quant_method"].value, values["format"]
    return values | {"quant_method": method, "checkpoint_format": format, "version": format}
