"""An option that saves memory trains what its plain twin trains: under accumulation, and with an auxiliary loss."""

import pytest
from language_runs import cut, documents, gradients, llama, padded, relative
from transformers import MixtralConfig, MixtralForCausalLM

from shared_core.distillation.teacher_cache import write_teacher_cache


def experts(seed, layers=2):
    """Return a mixture of experts whose router's loss is a large part of the whole, and no sum over positions."""
    options = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = llama(seed, layers, MixtralForCausalLM, MixtralConfig, **options)
    model.set_experts_implementation("eager")
    return model


def distilled(**options):
    return lambda teacher, folder: {"distill": {"alpha": 0.3, **options, "teacher": teacher}}


def cached(teacher, folder):
    write_teacher_cache(
        teacher, cut(documents(), 6, padded), folder / "cache", temperature=2.0, top_k=24, dtype="float32"
    )
    return {"distill": {"teacher": f"cache:{folder / 'cache'}", "alpha": 0.3}}


def alone(key, **options):
    return lambda teacher, folder: {key: options}


def plain(teacher, folder):
    return {}


OPTIONS = {
    "chunked": (distilled(chunked=True), distilled()),
    "chunks of few rows": (distilled(chunked=True, budget_mib=0.0005), distilled()),
    "chunked without a soft term": (distilled(chunked=True, alpha=1.0), plain),
    "logits without a soft term": (distilled(alpha=1.0), plain),
    "cached teacher": (cached, distilled()),
    "packed activations": (alone("activations", pack="exact", min_size=1), plain),
    **{
        f"checkpointing {policy}": (alone("checkpointing", policy=policy), plain)
        for policy in ("block", "sublayer", "sqrt", "every_k", "selective", "budget:least")
    },
    "chunked, checkpointed and packed": (
        lambda teacher, folder: {
            **distilled(chunked=True)(teacher, folder),
            "checkpointing": {"policy": "block"},
            "activations": {"pack": "exact", "min_size": 1},
        },
        distilled(),
    ),
}
BESIDE_DISTILLATION = [case for case, (_, twin) in OPTIONS.items() if twin is not plain]


def compare(case, front_end, tmp_path, make=experts):
    found = []
    for build in OPTIONS[case]:
        recipe = build(make(1, 3), tmp_path)
        found.append(gradients(front_end, make(0), recipe, cut(documents(), 2, padded), tmp_path)[0])
    assert relative(*found) < 2e-5


@pytest.mark.parametrize("case", OPTIONS)
def test_in_a_plain_loop(case, tmp_path):
    compare(case, "bare", tmp_path)


@pytest.mark.parametrize("case", OPTIONS)
def test_in_the_trainer_which_counts_labels(case, tmp_path):
    compare(case, "hf", tmp_path)


@pytest.mark.parametrize("case", BESIDE_DISTILLATION)
@pytest.mark.parametrize("front_end", ["lightning", "accelerate", "fabric"])
def test_in_other_front_ends(front_end, case, tmp_path):
    compare(case, front_end, tmp_path, llama)
