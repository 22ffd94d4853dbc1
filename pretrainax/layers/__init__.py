"""Building blocks that all model families share.

Modules take the whole ModelConfig, leaf functions take plain arguments.
"""
