"""Benchmarks of parts of the learner."""
