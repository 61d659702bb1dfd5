"""Modules of a model: names that match, example calls, views of weights."""
