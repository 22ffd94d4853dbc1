"""Object stores and the Hugging Face Hub: local copies of remote folders and models."""
