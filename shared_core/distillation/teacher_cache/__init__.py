"""A teacher's outputs on disk: written once, then looked up by example in any order, padding or size of batch."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.distillation.teacher_cache.format import Manifest as Manifest
    from shared_core.distillation.teacher_cache.keys import example_rows as example_rows
    from shared_core.distillation.teacher_cache.keys import folder_fingerprint as folder_fingerprint
    from shared_core.distillation.teacher_cache.keys import teacher_fingerprint as teacher_fingerprint
    from shared_core.distillation.teacher_cache.keys import template_fingerprint as template_fingerprint
    from shared_core.distillation.teacher_cache.keys import tokenizer_fingerprint as tokenizer_fingerprint
    from shared_core.distillation.teacher_cache.reader import TeacherCache as TeacherCache
    from shared_core.distillation.teacher_cache.writer import CachedTargets as CachedTargets
    from shared_core.distillation.teacher_cache.writer import top_k_targets as top_k_targets
    from shared_core.distillation.teacher_cache.writer import write_teacher_cache as write_teacher_cache

export_lazily(__name__)
