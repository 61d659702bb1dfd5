"""Lora."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.lora.config import LoraConfig as LoraConfig
    from shared_core.lora.technique import Lora as Lora

export_lazily(__name__)
