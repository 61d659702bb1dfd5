"""Compiled models: each technique's is one graph, compiled anew only where something begins or ends.

Operators are what they declare. What Dynamo does is the same on every device, so that the CPU shows it.
"""

import sys

import pytest
import torch
from eff_kernels import (  # noqa: F401 each registers its operators
    block_formats,
    distillation,
    fp8,
    masks,
    pruning,
    rounding,
)
from eff_kernels.loss_scaling import bits_of_threshold
from eff_kernels.quantization import affine, integer_linear  # noqa: F401
from small_encoder import VOCABULARY, Encoder
from torch._library.custom_ops import OPDEFS
from torch.nn import functional as F

from shared_core import Recipe, Session
from shared_core.engine.registry import REGISTRY
from shared_core.fp8 import Fp8Config
from shared_core.fp8.arithmetic import ScaledArithmetic
from shared_core.fp8.layers import LayerFp8
from shared_core.tools.export import onnx_layers  # noqa: F401

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

    session = Session(Recipe.from_dict(recipe))
    session.attach(model, surroundings=["compiled"])
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
        session.before_optimizer_step()
        scaler.step(optimizer)
        scaler.update()
        session.after_optimizer_step()
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


def operands():
    """Return arguments for every operator of this library."""
    layer = LayerFp8(ScaledArithmetic(Fp8Config(recipe="tensorwise"), None, 0, None))
    torch.manual_seed(0)
    x, w, g = torch.randn(32, 16), torch.randn(32, 16), torch.randn(32, 32)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    mask = x > 0
    codes, weight = torch.randint(256, (4, 16), dtype=torch.uint8), torch.randint(-64, 64, (8, 16), dtype=torch.int8)
    ops = torch.ops.eff_kernels, torch.ops.efftrain
    return layer, {
        ops[0].fp8_quantize: (x, None, torch.float8_e4m3fn, [0, 0], "exact", True),
        ops[0].kd_rows_: (x.clone(), w, torch.arange(32) % 16, 2.0, 0.5, 0.5),
        ops[0].count_magnitudes: ([x, w], bits_of_threshold(2.0**-14)),
        ops[0].count_exponents: (x,),
        ops[0].unscale_and_scan_: ([x.clone(), w.clone()], torch.zeros(1), torch.ones(1), 0),
        ops[0].rank_groups: (x, 2, 4, 1),
        ops[0].packed_bits: (mask,),
        ops[0].unpacked_bits: (torch.ops.eff_kernels.packed_bits(mask), [32, 16]),
        ops[0].count_digits_: (torch.zeros(256, dtype=torch.int64), x, torch.zeros(1, dtype=torch.int64), -1, 24),
        ops[0].store_zeros_: ([x.clone(), w.clone()], [mask, mask]),
        ops[0].round_float_: (torch.empty(32, 16), x, "nearest_even", 3, 7, 448.0, 448.0, 448.0),
        ops[0].mx_round: (x, "fp8_e4m3", 16),
        ops[0].nvfp4_round: (x, None, torch.float32),
        ops[0].round_to_grid: (x, one, zero, None, -8, 7),
        ops[0].grid_gradients: (w, x, one, zero, None, -8, 7, False, "lsq"),
        ops[0].round_rows: (x, None, 16, -8, 7, True),
        ops[0].pass_between: (x, w, -1.0, 1.0),
        ops[1].fp8_linear: (x, w, layer.handle, False),
        ops[1].fp8_grad_input: (g, w, layer.handle, False),
        ops[1].fp8_grad_weight: (g, x, layer.handle, False, torch.float32),
        ops[1].fp8_grads: (g, x, w, layer.handle, False),
        ops[1].step_noise: (w, 3, torch.tensor(5), 1),
        ops[1].quantize: (x, torch.tensor(0.1), torch.tensor(3), 8),
        ops[1].dequantize: (codes, torch.tensor(0.1), torch.tensor(3), 0, 0),
        ops[1].linear: (x, w, torch.zeros(32)),
        ops[1].integer_linear: (codes, weight, 3),
    }


PACKED = {"eff_kernels::integer_linear"}  # its weight is in oneDNN's own layout, of which no fake can be made


def test_operators_are_what_they_declare():
    declared = {name for name in OPDEFS if name.startswith(("eff_kernels::", "efftrain::"))} - PACKED
    layer, calls = operands()
    assert {op._qualified_op_name for op in calls} == declared
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments)
    del layer  # held until here, as operators find it by number
