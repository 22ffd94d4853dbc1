"""Defines the device mesh, and the shardings of parameters, optimizer states, batches and activations."""
