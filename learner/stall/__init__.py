"""Stall detection: causes and progress."""
