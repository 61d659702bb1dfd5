"""Quantization: fake quantisation in training, ranges, and conversion to an integer model."""

from shared_core.quantization.config import QatConfig as QatConfig
from shared_core.quantization.convert import convert as convert
from shared_core.quantization.fake_quant import choose_qparams_affine as choose_qparams_affine
from shared_core.quantization.fake_quant import choose_qparams_symmetric as choose_qparams_symmetric
from shared_core.quantization.fake_quant import fake_quantize as fake_quantize
from shared_core.quantization.modules import apply_ranges as apply_ranges
from shared_core.quantization.technique import QuantizationAwareTraining as QuantizationAwareTraining
