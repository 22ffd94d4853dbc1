"""Imports and exports weights, adapters and tokenizers in the formats of other libraries."""
