"""Experimental packages: they work and are tested, but their names and results may change in any version."""
