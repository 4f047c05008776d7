"""Asynchronous, decoupled actor-learner reinforcement learning for language models."""
