"""What a session observes in addition to its techniques, each with its own state."""
