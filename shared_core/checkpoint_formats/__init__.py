"""Where ingredients come from: Hugging Face folders, Lightning, distributed and plain checkpoints, adapters."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.checkpoint_formats.distributed import DistributedWeights as DistributedWeights
    from shared_core.checkpoint_formats.distributed import check_indexes as check_indexes
    from shared_core.checkpoint_formats.files import ADAPTER as ADAPTER
    from shared_core.checkpoint_formats.files import DISTRIBUTED as DISTRIBUTED
    from shared_core.checkpoint_formats.files import HF_FOLDER as HF_FOLDER
    from shared_core.checkpoint_formats.files import IN_MEMORY as IN_MEMORY
    from shared_core.checkpoint_formats.files import LIGHTNING as LIGHTNING
    from shared_core.checkpoint_formats.files import RAW_KEY as RAW_KEY
    from shared_core.checkpoint_formats.files import RUN_KEY as RUN_KEY
    from shared_core.checkpoint_formats.files import SAFETENSORS as SAFETENSORS
    from shared_core.checkpoint_formats.files import Ingredient as Ingredient
    from shared_core.checkpoint_formats.files import TensorSpec as TensorSpec
    from shared_core.checkpoint_formats.files import averaged as averaged
    from shared_core.checkpoint_formats.files import load_torch_file as load_torch_file
    from shared_core.checkpoint_formats.files import read_json as read_json
    from shared_core.checkpoint_formats.files import storage_key as storage_key
    from shared_core.checkpoint_formats.foreign import Foreign as Foreign
    from shared_core.checkpoint_formats.foreign import load_checkpoint as load_checkpoint
    from shared_core.checkpoint_formats.foreign import without_foreign as without_foreign
    from shared_core.checkpoint_formats.opening import expand as expand
    from shared_core.checkpoint_formats.opening import open_ingredient as open_ingredient

export_lazily(__name__)
