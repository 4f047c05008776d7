"""Recorded numbers, and how they are recorded."""
