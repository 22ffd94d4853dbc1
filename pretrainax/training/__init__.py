"""Implements a training run: its parts, the loop around the jitted update, losses, logging and restoring."""
