"""Losses between a student and its teacher."""
