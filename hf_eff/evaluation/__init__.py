"""Evaluation of a checkpoint by its task."""
