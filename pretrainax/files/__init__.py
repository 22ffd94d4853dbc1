"""Contains utilities for files: one-line errors, checks of names and paths, JSON, and atomic writes.

This package imports no other package of PretrainAX.
"""
