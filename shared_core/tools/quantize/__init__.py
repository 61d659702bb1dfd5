"""Quantisation of a trained model with everything that is measured of it, as `eff quantize` does it."""
