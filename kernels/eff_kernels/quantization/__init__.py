"""Quantization: one file an operation."""
