"""The process and its machine: devices, clocks, signals, and the other processes of a run."""
