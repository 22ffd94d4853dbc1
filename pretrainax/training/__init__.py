"""Implements training runs: setup, the jitted update, the training loop, losses, logging and restoring."""
