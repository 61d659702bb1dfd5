from .compressed_tensors import export_compressed_tensors as export_compressed_tensors
from .executorch import ProgramReport as ProgramReport
from .executorch import export_executorch as export_executorch
from .gguf import export_gguf as export_gguf
from .onnx import ExportReport as ExportReport
from .onnx import export_onnx as export_onnx
from .served import ServedReport as ServedReport
from .torchao import export_torchao as export_torchao
