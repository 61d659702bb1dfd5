"""Export."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.tools.export.executorch import ProgramReport as ProgramReport
    from shared_core.tools.export.executorch import export_executorch as export_executorch
    from shared_core.tools.export.onnx import ExportReport as ExportReport
    from shared_core.tools.export.onnx import export_onnx as export_onnx

export_lazily(__name__)
