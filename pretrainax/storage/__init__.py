"""Manages local copies of folders in object stores and of models on the Hugging Face Hub."""
