"""A training run: the run's parts, the loop around the jitted step, losses, logging and restoring."""
