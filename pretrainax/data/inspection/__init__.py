"""The rows that a model will see, measured and shown before the first step."""
