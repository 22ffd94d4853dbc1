"""Formats tables, units and plots for terminals and files."""
