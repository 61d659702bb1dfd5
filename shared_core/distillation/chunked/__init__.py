"""Distillation losses that never hold all logits."""
