"""The lowest package: one-line errors, names and paths, JSON, and atomic writes."""
