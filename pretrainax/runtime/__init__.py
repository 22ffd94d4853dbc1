"""The process and the machine: devices, clocks, signals, the other processes of a run."""
