"""Distillation: a teacher's softened outputs, features and relations as further targets for the student."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
