"""Inference: loads trained models, and generates, fills in, embeds and classifies text with them."""
