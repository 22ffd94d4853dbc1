"""Evaluates models: likelihoods of documents, likelihoods of spans for all model families, and zero-shot tasks."""
