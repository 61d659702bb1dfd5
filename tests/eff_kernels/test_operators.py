"""Every operator of this library is what it declares to torch: schema, shapes of results, gradients."""

import torch
from eff_kernels import (  # noqa: F401 each registers its operators
    distillation,
    fp8,
    masks,
    pruning,
    rounding,
)
from eff_kernels.loss_scaling import bits_of_threshold
from eff_kernels.quantization import affine, integer_linear  # noqa: F401
from torch._library.custom_ops import OPDEFS

from shared_core.fp8 import Fp8Config
from shared_core.fp8.arithmetic import ScaledArithmetic
from shared_core.fp8.layers import LayerFp8
from shared_core.tools.export import onnx_layers  # noqa: F401


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
        ops[0].kd_rows_: (x.clone(), w, torch.arange(32) % 16, 2.0, 0.5, 0.5),
        ops[0].kd_rows: (x, w, torch.arange(32) % 16, 2.0, 0.5, 0.5),
        ops[0].count_magnitudes: ([x, w], bits_of_threshold(2.0**-14)),
        ops[0].count_exponents: (x,),
        ops[0].unscale_and_scan_: ([x.clone(), w.clone()], torch.zeros(1), torch.ones(1)),
        ops[0].rank_groups: (x, 2, 4, 1, True),
        ops[0].packed_bits: (mask,),
        ops[0].unpacked_bits: (torch.ops.eff_kernels.packed_bits(mask), [32, 16]),
        ops[0].count_digits_: (torch.zeros(256, dtype=torch.int64), x, torch.zeros(1, dtype=torch.int64), 24),
        ops[0].mark_largest_: ([torch.empty_like(mask), torch.empty_like(mask)], [x, w], 700),
        ops[0].store_zeros_: ([x.clone(), w.clone()], [mask, mask]),
        ops[0].round_float_: (torch.empty(32, 16), x, "nearest_even", 3, 7, 448.0, 448.0, 448.0),
        ops[0].mx_round: (x, "fp8_e4m3", 16),
        ops[0].nvfp4_round: (x, None, torch.float32),
        ops[0].round_to_grid: (x, one, zero, None, -8, 7),
        ops[0].grid_gradients: (w, x, one, zero, None, -8, 7, False, "lsq"),
        ops[0].round_rows: (x, None, 16, -8, 7, True),
        ops[0].pass_between: (x, w, -1.0, 1.0),
        ops[1].fp8_linear: (x, w, None, layer.handle, False, [0, 0]),
        ops[1].fp8_grad_input: (g, w, layer.handle, False),
        ops[1].fp8_grad_weight: (g, x, None, layer.handle, False, torch.float32),
        ops[1].fp8_grads: (g, x, None, w, layer.handle, False),
        ops[1].step_noise: (w, 3, torch.tensor(5), 1),
        ops[1].quantize: (x, torch.tensor(0.1), torch.tensor(3), 8),
        ops[1].dequantize: (codes, torch.tensor(0.1), torch.tensor(3), 0, 0),
        ops[1].quantize_fp8: (x, torch.tensor(0.1)),
        ops[1].signs: (x,),
        ops[1].linear: (x, w, torch.zeros(32)),
        ops[1].quantize_rows: (x, x.abs().amax(1, keepdim=True) / 127),
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
