"""The evaluation of checkpoints and models, as the command `pretrainax.evaluate` asks for it."""
