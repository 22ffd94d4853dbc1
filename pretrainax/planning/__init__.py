"""Plans a run without an accelerator: memory, communication, step time, hours and price."""
