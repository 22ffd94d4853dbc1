"""Prepares corpora: filters, deduplicates and tokenizes documents into token shards in the cache."""
