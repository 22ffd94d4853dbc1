"""From documents to token shards in the cache."""
