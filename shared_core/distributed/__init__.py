"""Messages between ranks, and the parts of a tensor that a rank holds."""
