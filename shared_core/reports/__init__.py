"""Pages about runs and models."""
