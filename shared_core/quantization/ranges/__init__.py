"""Ranges of values and how they are found."""
