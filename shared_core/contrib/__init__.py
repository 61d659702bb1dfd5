"""Parts that work and are tested, but whose names and results may change in any version."""
