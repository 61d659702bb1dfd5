"""What a session watches beside its techniques, each with state of its own."""
