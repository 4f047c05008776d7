"""Runs as a whole: launcher, serial and replay runtimes, and commands."""
