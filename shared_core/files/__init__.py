"""Files: atomic replacement, checksums, journals, bounded YAML and JSON."""
