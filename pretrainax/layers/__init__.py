"""The bricks: each written once, used by every family. Modules take the ModelConfig whole, leaves plain arguments."""
