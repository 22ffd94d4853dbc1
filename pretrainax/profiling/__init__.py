"""Reads profiles of a run, sums up kernel times by module of the model, and compares them with a plan's estimates."""
