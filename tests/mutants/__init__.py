"""Mutants: single changes of the tree, each a bug that the fast tests must catch."""
