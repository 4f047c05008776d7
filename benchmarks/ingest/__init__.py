"""Throughput of trajectories from generator to learner, compared with bare alternatives."""
