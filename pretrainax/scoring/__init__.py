"""Evaluates a model: likelihoods of documents, of spans that all families can predict, and zero-shot tasks."""
