"""Quantization: fake quantisation in training, ranges, and conversion to an integer model."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.quantization.batch_norm import FusionReport as FusionReport
    from shared_core.quantization.batch_norm import find_batch_norms as find_batch_norms
    from shared_core.quantization.batch_norm import fold_batch_norm as fold_batch_norm
    from shared_core.quantization.batch_norm import fold_pair_ as fold_pair_
    from shared_core.quantization.batch_norm import fuse_batch_norm as fuse_batch_norm
    from shared_core.quantization.batch_norm import unfold_pair_ as unfold_pair_
    from shared_core.quantization.config import QatConfig as QatConfig
    from shared_core.quantization.functional.affine import ActivationQParams as ActivationQParams
    from shared_core.quantization.functional.affine import choose_qparams_activation as choose_qparams_activation
    from shared_core.quantization.functional.affine import choose_qparams_affine as choose_qparams_affine
    from shared_core.quantization.functional.affine import choose_qparams_symmetric as choose_qparams_symmetric
    from shared_core.quantization.functional.affine import dequantize_groups as dequantize_groups
    from shared_core.quantization.functional.affine import fake_quantize as fake_quantize
    from shared_core.quantization.functional.affine import fake_quantize_groups as fake_quantize_groups
    from shared_core.quantization.functional.affine import fake_quantize_tokens as fake_quantize_tokens
    from shared_core.quantization.functional.affine import fake_quantize_weight as fake_quantize_weight
    from shared_core.quantization.functional.affine import quantize_groups as quantize_groups
    from shared_core.quantization.functional.learned import learned_range_fake_quantize as learned_range_fake_quantize
    from shared_core.quantization.functional.learned import lsq_fake_quantize as lsq_fake_quantize
    from shared_core.quantization.functional.learned import lsq_grad_scale as lsq_grad_scale
    from shared_core.quantization.functional.learned import lsq_init_scale as lsq_init_scale
    from shared_core.quantization.functional.learned import pact as pact
    from shared_core.quantization.functional.low_bit import binarize as binarize
    from shared_core.quantization.functional.low_bit import binarize_activation as binarize_activation
    from shared_core.quantization.functional.low_bit import fp8_fake_quantize as fp8_fake_quantize
    from shared_core.quantization.functional.low_bit import ternarize as ternarize
    from shared_core.quantization.integer.backends import conversion_report as conversion_report
    from shared_core.quantization.integer.convert import convert as convert
    from shared_core.quantization.post_training.adversarial import AdversarialAccuracy as AdversarialAccuracy
    from shared_core.quantization.post_training.adversarial import adversarial_accuracy as adversarial_accuracy
    from shared_core.quantization.post_training.adversarial import fgsm as fgsm
    from shared_core.quantization.post_training.adversarial import pgd as pgd
    from shared_core.quantization.post_training.bit_allocation import BitPlan as BitPlan
    from shared_core.quantization.post_training.bit_allocation import SelectivePlan as SelectivePlan
    from shared_core.quantization.post_training.bit_allocation import keep_high as keep_high
    from shared_core.quantization.post_training.bit_allocation import plan_bits as plan_bits
    from shared_core.quantization.post_training.bit_allocation import plan_by_quality as plan_by_quality
    from shared_core.quantization.post_training.equalization import BiasCorrectionReport as BiasCorrectionReport
    from shared_core.quantization.post_training.equalization import EqualizationReport as EqualizationReport
    from shared_core.quantization.post_training.equalization import correct_bias as correct_bias
    from shared_core.quantization.post_training.equalization import equalize as equalize
    from shared_core.quantization.post_training.quality import judge_loss as judge_loss
    from shared_core.quantization.post_training.quantize import QuantizationReport as QuantizationReport
    from shared_core.quantization.post_training.quantize import quantize as quantize
    from shared_core.quantization.post_training.quantize import quantize_with_report as quantize_with_report
    from shared_core.quantization.post_training.sensitivity import TraceEstimate as TraceEstimate
    from shared_core.quantization.post_training.sensitivity import hessian_trace as hessian_trace
    from shared_core.quantization.post_training.sensitivity import layer_sensitivity as layer_sensitivity
    from shared_core.quantization.post_training.torchao_calibration import TorchaoReport as TorchaoReport
    from shared_core.quantization.post_training.torchao_calibration import methods_here as methods_here
    from shared_core.quantization.post_training.torchao_calibration import (
        quantize_with_torchao as quantize_with_torchao,
    )
    from shared_core.quantization.post_training.torchao_calibration import to_plain_weights as to_plain_weights
    from shared_core.quantization.ranges.histogram import Histogram as Histogram
    from shared_core.quantization.ranges.observers import EstimatorBank as EstimatorBank
    from shared_core.quantization.ranges.observers import RangeEstimator as RangeEstimator
    from shared_core.quantization.ranges.observers import make_observer as make_observer
    from shared_core.quantization.ranges.saved_ranges import apply_ranges as apply_ranges
    from shared_core.quantization.technique import QuantizationAwareTraining as QuantizationAwareTraining

export_lazily(__name__)
