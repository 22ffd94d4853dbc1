"""Reads profiles of a run: the time of each kernel by module of the model, beside what a plan expects of it."""
