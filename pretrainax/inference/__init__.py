"""Inference with trained models: loading, text generation, filling holes, embeddings and task predictions."""
