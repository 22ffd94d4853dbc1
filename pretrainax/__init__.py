"""PretrainAX: pretrain encoders, encoder-decoders and decoders in JAX."""
