"""From records to batches: sources of text, token shards on disk, objectives, the pipeline. Imports no JAX."""
