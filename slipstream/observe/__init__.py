"""Observe a run without taking part in it."""
