"""Answers a question about pretraining with a study: arms with equal budgets, tuned rates, seeds, and a verdict."""
