"""Reads profiles of a run: the time of each kernel, by module of the model, compared with a plan."""
