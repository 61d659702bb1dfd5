"""Adapters of a Lightning Trainer to a technique: a module each; drivers call all."""
