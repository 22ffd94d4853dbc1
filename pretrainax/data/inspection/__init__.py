"""Computes statistics and views of the rows that a model will be trained on, and statistics of prepared corpora."""
