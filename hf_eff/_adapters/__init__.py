"""Adapters of the Trainer to a technique, or to a trainer of another library: a module each; drivers call all."""
