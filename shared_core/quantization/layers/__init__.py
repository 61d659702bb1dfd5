"""Layers that quantize while they train."""
