"""Fake quantization: tensors in, tensors out."""
