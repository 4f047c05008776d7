"""Processes under chaos, watched: journals at both ends of a wire, and points to die at."""
