"""Explain a recipe before its run."""
