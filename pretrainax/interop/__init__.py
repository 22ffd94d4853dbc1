"""Import and export of weights, adapters and tokenizers of other libraries."""
