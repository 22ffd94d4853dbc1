"""Files below everything else: errors of one line, names and paths, JSON, and writing that a crash leaves whole."""
