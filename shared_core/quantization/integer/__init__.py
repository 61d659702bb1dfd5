"""Layers that compute with integers."""
