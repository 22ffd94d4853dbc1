"""Builds batches from records: data sources, token shards, packing and objectives. Imports no JAX."""
