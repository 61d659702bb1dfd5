"""A packed batch trains as its documents do with a row each."""

import pytest
import torch
from language_runs import FRONT_ENDS, cut, documents, gradients, llama, packed, padded, relative

from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.modules.calls import evaluated

OPTIONS = {
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
    return {"distill": {"teacher": teacher, "alpha": 0.3, **OPTIONS[case]}}


def student():
    model = llama(0)
    model.config.use_cache = False  # else transformers itself packs nothing, whatever is trained on
    return model


@pytest.mark.parametrize("size", [6, 3], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("case", OPTIONS)
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
