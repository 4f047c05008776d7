"""Mutants: single-change bugs that the fast tests must catch."""
