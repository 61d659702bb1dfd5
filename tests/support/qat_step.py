"""A model of transformers after one step of quantization-aware training."""

from shared_core.engine.technique import Context
from shared_core.quantization import QatConfig, QuantizationAwareTraining


def qat_step(model, inputs, /, **options):
    """Train for a step; return the model, which quantizes, and what trained it."""
    technique = QuantizationAwareTraining(QatConfig(**options))
    context = Context(model=model, total_steps=1)
    technique.attach(context)
    technique.begin(context, None)
    model.train()
    model(**inputs).logits.square().mean().backward()
    technique.before_step(context)
    context.step += 1
    technique.after_step(context, True)
    return model.eval(), technique, context


def qat_result(model, inputs, /, **options):
    """Train for a step; return the baked model, and the ranges beside it."""
    model, technique, context = qat_step(model, inputs, **options)
    ranges = technique.deployment()["ranges"]
    technique.finish(context)
    return model, ranges
