"""The algorithms and the frame that both front ends drive; needs torch, knows no trainer."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.engine.recipe import Recipe as Recipe
    from shared_core.engine.session import Session as Session
    from shared_core.errors import EffError as EffError

export_lazily(__name__)
