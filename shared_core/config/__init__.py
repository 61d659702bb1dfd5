"""Options of a technique, and positions in training time."""
