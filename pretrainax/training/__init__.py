"""A run: its parts, the loop around the jitted step, the losses, and what is logged and restored."""
