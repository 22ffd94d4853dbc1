"""What a model will see, measured and shown before the first step."""
