"""Throughput of trajectories from generator to learner, beside bare alternatives."""
