"""Prompts of a run: the rows of its files, validated and measured."""
