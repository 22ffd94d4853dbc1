"""Scaling laws: published laws, the optimal model size and number of tokens for a budget, and fits to your own runs."""
