"""What a run will take, said before it is paid for: memory, traffic, time and price, without an accelerator."""
