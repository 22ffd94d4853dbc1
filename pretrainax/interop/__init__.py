"""Weights and tokenizers of other libraries, both ways."""
