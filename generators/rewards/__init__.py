"""Reward functions, run in worker processes that are killed at a time limit."""
