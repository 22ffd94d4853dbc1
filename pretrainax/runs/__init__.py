"""Whole runs: training with all that surrounds it, grids of runs, the check of a resumption, samples, model cards."""
