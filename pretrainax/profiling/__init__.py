"""Reads profiles of a run: measures the time of each kernel, by module of the model, and compares it with a plan."""
