"""Benchmarks: programs that measure cost and gain; README.md is their index."""
