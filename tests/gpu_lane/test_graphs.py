"""Compiled models: each technique's is one graph, compiled anew only where something begins or ends.

What Dynamo does is the same on every device, so that the CPU shows it.
"""

import sys

import pytest
import torch
from small_encoder import VOCABULARY, Encoder
from torch.nn import functional as F

from shared_core import Session
from shared_core.engine.registry import REGISTRY

pytestmark = pytest.mark.gpu_lane
BEGIN, FREEZE, STEPS = 4, 8, 12
AT = {"sparsity": 0.5, "schedule": "one_shot", "begin": BEGIN}
EACH = {"sparsity": 0.8, "schedule": "cubic", "begin": 0, "end": STEPS, "every": 1}
QAT = {"begin": BEGIN, "freeze_observers": FREEZE}
GRAPHS = {
    "matmul": {"matmul": {"precision": "high"}},
    "low_rank": {"low_rank": {"rank": 16, "force": True, "min_size": 1}},
    "lora": {"lora": {"rank": 4, "base": "none"}},
    "primary_weights": {"primary_weights": {"kind": "fp32_copy"}},
    "prune": {"prune": EACH},
    "prune n_m": {"prune": {**AT, "granularity": "n_m", "sr_ste": 2e-4}},
    "prune movement": {"prune": {**EACH, "criterion": "movement"}},
    "prune taylor": {"prune": {**EACH, "criterion": "taylor"}},
    "prune rigl": {"prune": {**AT, "dynamic": "rigl", "every": 1}},
    "prune l1": {"prune": {**AT, "regularizer": "l1"}},
    "cluster": {"cluster": {"bits": 4, "begin": BEGIN}},
    "qat": {"qat": {"scheme": "int8", **QAT}},
    "qat lsq": {"qat": {"scheme": "int8", "range": "lsq", **QAT}},
    "qat lsq_plus": {"qat": {"scheme": "int8", "range": "lsq_plus", **QAT}},
    "qat pact": {"qat": {"scheme": "int8", "range": "pact", **QAT}},
    "qat int8_dynamic": {"qat": {"scheme": "int8_dynamic", **QAT}},
    "qat int4_weight": {"qat": {"scheme": "int4_weight", **QAT}},
    "qat ternary": {"qat": {"scheme": "ternary", **QAT}},
    "qat fp8": {"qat": {"scheme": "fp8", **QAT}},
    "qat mxfp4": {"qat": {"scheme": "mxfp4", **QAT}},
    "qat stochastic": {"qat": {"scheme": "int8", "rounding": "stochastic", **QAT}},
    "fp8": {"fp8": {"recipe": "tensorwise"}},
    "fp8 delayed": {"fp8": {"recipe": "delayed", "amax_history": 3}},
    "fp8 rowwise": {"fp8": {"recipe": "rowwise"}},
    "fp8 mx": {"fp8": {"recipe": "mx"}},
    "fp8 int16": {"fp8": {"recipe": "int16"}},
    "checkpointing": {"checkpointing": {"policy": "block"}},
    "checkpointing selective": {"checkpointing": {"policy": "selective"}},
    "activations": {"activations": {"pack": "int8", "min_size": 32}},
    "distill": {"distill": {"temperature": 2.0, "temperature_end": 1.0, "alpha_end": 0.1}},
    "distill hidden": {"distill": {"hidden": ["layers.0=layers.0"]}},
    "loss_scale": {"loss_scale": {"kind": "dynamic", "growth_interval": 2, "telemetry_every": 1}},
    "average": {"average": {"kind": "ema"}},
}
NOT_COMPILED = {
    "lottery": "its runs are those of prune",
    "dp": "refuses a compiled model: its hooks are on single layers",
    "comm": "works between processes, outside the model",
    "soup": "works after training",
}


def compiled_steps(recipe):
    """Train a compiled model; return at which steps a graph was compiled."""
    torch._dynamo.reset()
    model, found = Encoder(num_blocks=1), []
    model = model.bfloat16() if "primary_weights" in recipe else model
    if "distill" in recipe:
        recipe = {"distill": recipe["distill"] | {"teacher": Encoder(num_blocks=1).eval()}}

    def compile_at(graph, inputs):
        found.append(session.step)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    session = Session(recipe)
    session.attach(model, run_environment=["compiled"])
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], 1e-3)
    forward = torch.compile(model, backend=compile_at, fullgraph=True)
    session.begin([optimizer], total_steps=STEPS)
    scaling = session.techniques.get("loss_scale")
    scaler = scaling.make_scaler("cpu") if scaling else torch.amp.GradScaler("cpu", enabled=False)
    ids = torch.randint(VOCABULARY, (2, 8))
    for _ in range(STEPS):
        optimizer.zero_grad()
        with session.forward():
            loss = session.loss(F.cross_entropy(forward(ids).float().transpose(1, 2), ids))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        session.before_step()
        scaler.step(optimizer)
        scaler.update()
        session.after_step()
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_a_model_is_one_graph_that_is_compiled_where_something_begins_or_ends(name, capsys):
    (key,) = GRAPHS[name]
    found = compiled_steps(GRAPHS[name])
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: one graph, compiled at steps {found} of {STEPS} ")
    assert found[0] == 0
    assert found in ([0], [0, BEGIN], [0, BEGIN, FREEZE]) if key == "qat" else found == [0]


def test_every_technique_is_compiled_or_says_why_not():
    assert {key for recipe in GRAPHS.values() for key in recipe} | NOT_COMPILED.keys() == set(REGISTRY)
