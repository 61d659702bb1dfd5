"""Gradients reduced over processes in fewer bytes: in 16 bits, or as matrices of low rank with error feedback."""

from shared_core.gradient_compression.config import CommConfig as CommConfig
from shared_core.gradient_compression.power_sgd import PowerSgd as PowerSgd
from shared_core.gradient_compression.technique import GradientCompression as GradientCompression
