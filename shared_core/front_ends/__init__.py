"""The trainers that drive a session, found by their entry points."""
