"""Provides file utilities: one-line errors, validation of names and paths, JSON, and atomic writes.

This package imports no other package of PretrainAX.
"""
