"""Finds how large a model, on how much text: published laws, the best for a budget, the law of your own runs."""
