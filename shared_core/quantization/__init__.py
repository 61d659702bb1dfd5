"""Quantization: fake quantisation in training, ranges, and conversion to an integer model."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.quantization.batch_norm_folding import fold_batch_norm as fold_batch_norm
    from shared_core.quantization.batch_norm_folding import fold_pair_ as fold_pair_
    from shared_core.quantization.batch_norm_folding import unfold_pair_ as unfold_pair_
    from shared_core.quantization.bias_correction import BiasCorrectionReport as BiasCorrectionReport
    from shared_core.quantization.bias_correction import correct_bias as correct_bias
    from shared_core.quantization.bit_plan import BitPlan as BitPlan
    from shared_core.quantization.bit_plan import plan_bits as plan_bits
    from shared_core.quantization.config import QatConfig as QatConfig
    from shared_core.quantization.convert import convert as convert
    from shared_core.quantization.equalization import EqualizationReport as EqualizationReport
    from shared_core.quantization.equalization import equalize as equalize
    from shared_core.quantization.estimator_bank import EstimatorBank as EstimatorBank
    from shared_core.quantization.export_executorch import ProgramReport as ProgramReport
    from shared_core.quantization.export_executorch import export_executorch as export_executorch
    from shared_core.quantization.export_onnx import ExportReport as ExportReport
    from shared_core.quantization.export_onnx import export_onnx as export_onnx
    from shared_core.quantization.fake_quant import ActivationQParams as ActivationQParams
    from shared_core.quantization.fake_quant import choose_qparams_activation as choose_qparams_activation
    from shared_core.quantization.fake_quant import choose_qparams_affine as choose_qparams_affine
    from shared_core.quantization.fake_quant import choose_qparams_symmetric as choose_qparams_symmetric
    from shared_core.quantization.fake_quant import fake_quantize as fake_quantize
    from shared_core.quantization.fast_convert import conversion_report as conversion_report
    from shared_core.quantization.fp8_fake_quant import fp8_fake_quantize as fp8_fake_quantize
    from shared_core.quantization.fusion import FusionReport as FusionReport
    from shared_core.quantization.fusion import find_batch_norms as find_batch_norms
    from shared_core.quantization.fusion import fuse_batch_norm as fuse_batch_norm
    from shared_core.quantization.group import dequantize_groups as dequantize_groups
    from shared_core.quantization.group import fake_quantize_groups as fake_quantize_groups
    from shared_core.quantization.group import fake_quantize_tokens as fake_quantize_tokens
    from shared_core.quantization.group import fake_quantize_weight as fake_quantize_weight
    from shared_core.quantization.group import output_channels_first as output_channels_first
    from shared_core.quantization.group import quantize_groups as quantize_groups
    from shared_core.quantization.histogram import Histogram as Histogram
    from shared_core.quantization.learned import learned_range_fake_quantize as learned_range_fake_quantize
    from shared_core.quantization.learned import lsq_fake_quantize as lsq_fake_quantize
    from shared_core.quantization.learned import lsq_grad_scale as lsq_grad_scale
    from shared_core.quantization.learned import lsq_init_scale as lsq_init_scale
    from shared_core.quantization.learned import pact as pact
    from shared_core.quantization.lora import LoraTraining as LoraTraining
    from shared_core.quantization.lora_config import LoraConfig as LoraConfig
    from shared_core.quantization.post_training import QuantizationReport as QuantizationReport
    from shared_core.quantization.post_training import quantize as quantize
    from shared_core.quantization.post_training import quantize_with_report as quantize_with_report
    from shared_core.quantization.quality_report import judge_loss as judge_loss
    from shared_core.quantization.range_estimator import RangeEstimator as RangeEstimator
    from shared_core.quantization.range_estimators import make_observer as make_observer
    from shared_core.quantization.ranges import apply_ranges as apply_ranges
    from shared_core.quantization.robustness import AdversarialAccuracy as AdversarialAccuracy
    from shared_core.quantization.robustness import adversarial_accuracy as adversarial_accuracy
    from shared_core.quantization.robustness import fgsm as fgsm
    from shared_core.quantization.robustness import pgd as pgd
    from shared_core.quantization.selective import SelectivePlan as SelectivePlan
    from shared_core.quantization.selective import keep_high as keep_high
    from shared_core.quantization.selective import plan_by_quality as plan_by_quality
    from shared_core.quantization.sensitivity import TraceEstimate as TraceEstimate
    from shared_core.quantization.sensitivity import hessian_trace as hessian_trace
    from shared_core.quantization.sensitivity import layer_sensitivity as layer_sensitivity
    from shared_core.quantization.technique import QuantizationAwareTraining as QuantizationAwareTraining
    from shared_core.quantization.ternary import binarize as binarize
    from shared_core.quantization.ternary import binarize_activation as binarize_activation
    from shared_core.quantization.ternary import ternarize as ternarize
    from shared_core.quantization.torchao_layers import methods_here as methods_here
    from shared_core.quantization.torchao_layers import to_plain_weights as to_plain_weights
    from shared_core.quantization.torchao_methods import TorchaoReport as TorchaoReport
    from shared_core.quantization.torchao_methods import quantize_with_torchao as quantize_with_torchao

export_lazily(__name__)
