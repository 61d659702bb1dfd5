"""Options that save memory, and packed batches, train what their plain twins train: under accumulation, too."""

import pytest
import torch
from language_runs import FRONT_ENDS, cut, documents, gradients, llama, packed, padded, relative
from transformers import MixtralConfig, MixtralForCausalLM

from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.modules.calls import evaluated


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


@pytest.mark.parametrize(
    ("front_end", "case"),
    [
        *((front_end, case) for front_end in ("bare", "hf") for case in OPTIONS),  # which counts labels
        *((front_end, case) for front_end in ("lightning", "accelerate", "fabric") for case in BESIDE_DISTILLATION),
    ],
)
def test_an_option_that_saves_memory_trains_what_its_plain_twin_trains(front_end, case, tmp_path):
    make, found = experts if front_end in ("bare", "hf") else llama, []
    for build in OPTIONS[case]:
        recipe = build(make(1, 3), tmp_path)
        found.append(gradients(front_end, make(0), recipe, cut(documents(), 2, padded), tmp_path)[0])
    assert relative(*found) < 2e-5


PACKED_OPTIONS = {
    "default": {},
    "chunked": {"chunked": True},
    "several teachers": {},
    "moving average": {"teacher": "ema"},
    "mutual": {"teacher": "mutual"},
    "cached": {},
    "confidence": {"divergence": "jsd", "confidence": 0.08},
    "hidden": {"hidden": ["model.layers.1=model.layers.2"]},
    "relations": {"hidden": ["model.layers.1=model.layers.2"], "hidden_loss": "rkd"},
    "cka": {"hidden": ["model.layers.1=model.layers.2"], "hidden_loss": "cka"},
    "attention": {"attention": ["model.layers.0.self_attn=model.layers.2.self_attn"]},
}


def recipe_of(case, folder, window):
    teacher = [llama(1, 3), llama(2, 3)] if case == "several teachers" else llama(1, 3)
    if case == "cached":
        write_teacher_cache(teacher, window, folder / "cache", temperature=2.0)
        teacher = f"cache:{folder / 'cache'}"
    return {"distill": {"teacher": teacher, "alpha": 0.3, **PACKED_OPTIONS[case]}}


def student():
    model = llama(0)
    model.config.use_cache = False  # else transformers itself packs nothing, whatever is trained on
    return model


@pytest.mark.parametrize("size", [6, 3], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("case", PACKED_OPTIONS)
def test_a_teacher_sees_documents_apart(case, size, tmp_path):
    found = []
    for number, collate in enumerate((padded, packed)):
        folder, window = tmp_path / str(number), cut(documents(), size, collate)
        folder.mkdir()
        found.append(gradients("bare", student(), recipe_of(case, folder, window), window, folder)[0])
    assert relative(*found) < 1e-5


@pytest.mark.parametrize("front_end", [*FRONT_ENDS][1:])
def test_in_every_front_end(front_end, tmp_path):
    windows = [cut(documents(), 3, collate) for collate in (padded, packed)]
    found = [
        gradients(front_end, student(), recipe_of("default", tmp_path, ()), window, tmp_path)[0] for window in windows
    ]
    assert relative(*found) < 1e-5


def test_so_does_a_model_that_calibration_runs_in_evaluation_mode():
    model = torch.nn.Sequential(llama(0))  # a wrapper without a configuration
    lone, batch = model[0].eval(), packed(documents())
    with torch.no_grad():
        alone = [lone(torch.tensor([row]), use_cache=False).logits for row in documents()]
    with evaluated(model):
        found = lone(**batch).logits
    torch.testing.assert_close(found, torch.cat(alone, 1))
    assert lone.config.use_cache
