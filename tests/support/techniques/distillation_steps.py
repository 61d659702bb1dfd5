"""Distillation as a bare technique: attached, begun, and driven a loss at a time."""

from shared_core.distillation import Distillation, DistillConfig
from shared_core.engine.technique import Context


def attached(model, teacher, services=None, total_steps=10, **options):
    technique = Distillation(DistillConfig(**{"teacher": teacher, **options}))
    context = Context(model, total_steps=total_steps, **({} if services is None else {"services": services}))
    technique.attach(context)
    technique.begin(context, None)
    return technique, context
