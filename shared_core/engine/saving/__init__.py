"""What a session leaves in checkpoints, and how it is read again."""
