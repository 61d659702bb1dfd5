"""What ranks tell each other, and the parts of a tensor that a rank holds."""
