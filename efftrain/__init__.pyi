from shared_core import EffError as EffError
from shared_core import Recipe as Recipe
from shared_core import Session as Session
from shared_core import register as register
from shared_core import training as training
from shared_core.quantization import conversion_report as conversion_report
from shared_core.quantization import convert as convert
from shared_core.quantization import quantize as quantize
from shared_core.tools.export import export_onnx as export_onnx
from shared_core.tools.shrink import shrink as shrink
from shared_core.tools.sparse_inference import sparse_layers as sparse_layers

from . import hf as hf
from . import lightning as lightning

__version__: str
