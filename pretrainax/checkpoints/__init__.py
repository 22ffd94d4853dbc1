"""Checkpoints of runs: save, verify, select and restore."""
