"""Prepares corpora: filters, deduplicates and tokenizes documents, and writes the token shards to the cache."""
