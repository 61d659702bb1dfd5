"""Where ingredients come from: Hugging Face folders, Lightning, distributed and plain checkpoints, adapters."""

from shared_core.soup.sources.distributed import DistributedWeights as DistributedWeights
from shared_core.soup.sources.distributed import check_indexes as check_indexes
from shared_core.soup.sources.files import load_torch_file as load_torch_file
from shared_core.soup.sources.files import read_json as read_json
from shared_core.soup.sources.ingredient import ADAPTER as ADAPTER
from shared_core.soup.sources.ingredient import DISTRIBUTED as DISTRIBUTED
from shared_core.soup.sources.ingredient import HF_FOLDER as HF_FOLDER
from shared_core.soup.sources.ingredient import IN_MEMORY as IN_MEMORY
from shared_core.soup.sources.ingredient import LIGHTNING as LIGHTNING
from shared_core.soup.sources.ingredient import RAW_KEY as RAW_KEY
from shared_core.soup.sources.ingredient import RUN_KEY as RUN_KEY
from shared_core.soup.sources.ingredient import SAFETENSORS as SAFETENSORS
from shared_core.soup.sources.ingredient import Ingredient as Ingredient
from shared_core.soup.sources.ingredient import TensorSpec as TensorSpec
from shared_core.soup.sources.ingredient import averaged as averaged
from shared_core.soup.sources.ingredient import storage_key as storage_key
from shared_core.soup.sources.opening import expand as expand
from shared_core.soup.sources.opening import open_ingredient as open_ingredient
