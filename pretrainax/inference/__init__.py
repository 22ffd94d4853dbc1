"""Uses a trained model: reads it from wherever it lies, and writes, fills in, embeds and scores text with it."""
