"""Manages one process of a run on its machine: devices, clocks, signals, and communication with other processes."""
