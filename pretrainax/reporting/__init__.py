"""Tables, units and plots, for terminals and files."""
