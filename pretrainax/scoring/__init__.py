"""Says how good a model is: how likely it finds texts, spans of them that all families can be asked for, and tasks."""
