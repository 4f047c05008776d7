"""Metrics of a step and of a run, and their alerts."""
