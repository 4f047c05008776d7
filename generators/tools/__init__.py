"""Tools: what a model may call while it answers, and the forms in which it calls."""
