"""Saves, verifies, selects and restores the checkpoints of runs."""
