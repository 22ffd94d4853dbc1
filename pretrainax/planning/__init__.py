"""Needs of a run, before it is paid for: memory, traffic, time and price, without an accelerator."""
