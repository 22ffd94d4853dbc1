"""PretrainAX: pretrain encoders, encoder-decoders and decoders in JAX."""

__version__ = "0.3.0"
