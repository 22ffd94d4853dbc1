"""Scaling laws: published laws, the optimal model and amount of text for a budget, and fits to your own runs."""
