"""Asks a model tasks that it was not trained for: pairs of sentences, choices, last words, questions to answer."""
