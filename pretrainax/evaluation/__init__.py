"""Evaluates checkpoints and models for the command `pretrainax.evaluate`."""
