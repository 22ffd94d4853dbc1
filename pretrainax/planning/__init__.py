"""Says what a run will take before it is paid for: memory, traffic, time and price, without an accelerator."""
