"""Adapters between a Lightning Trainer and single techniques, one module each."""
