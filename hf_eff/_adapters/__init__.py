"""Adapters between the Trainer and single techniques or other libraries' trainers, one module each."""
