"""Statistics and views of the rows that a model will be trained on."""
