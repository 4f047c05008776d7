"""Metrics of a run: token statistics, rows and summary, alerts."""
