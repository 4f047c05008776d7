"""Processes under chaos with journals at both ends of a connection, and points at which to die."""
