"""Runs whose generators come, go, or differ in speed."""
