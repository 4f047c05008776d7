"""Fuzz test: a real broker under mutated frames."""
