"""Tools that a model may call, and call formats."""
