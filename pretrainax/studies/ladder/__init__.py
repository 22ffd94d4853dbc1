"""Trains a ladder of small runs, fits a scaling law to them, and registers a prediction before a larger run starts."""
