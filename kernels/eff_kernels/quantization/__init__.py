"""Quantization, with one file per operation."""
