"""Start the user's own training several times: lotteries, chains of students, searches, trials of techniques."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
