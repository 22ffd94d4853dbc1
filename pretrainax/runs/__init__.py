"""Complete runs: training with header and final report, grids of runs, resume checks, samples and model cards."""
