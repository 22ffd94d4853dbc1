"""Tables, units and pictures, for a terminal and for files."""
