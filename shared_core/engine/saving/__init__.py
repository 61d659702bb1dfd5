"""Saving a session's state in checkpoints, and restoring it."""
