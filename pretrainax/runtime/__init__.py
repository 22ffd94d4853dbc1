"""Code for one process of a run and its machine: devices, clocks, signals, and communication between processes."""
