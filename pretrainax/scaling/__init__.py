"""The best size of a model and of its text: published laws, the best for a budget, the law of your own runs."""
