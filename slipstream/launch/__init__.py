"""Runs as a whole: the launcher, the serial and replay runtimes, and the commands that act on a run."""
