"""Saves and restores a run, and knows which checkpoint can be trusted."""
