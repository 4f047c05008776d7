"""Overhead of the framework: generator and learner, each bare, wrapped, and whole."""
