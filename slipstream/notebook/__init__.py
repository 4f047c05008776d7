"""Slipstream from a script or a notebook: start runs, read what they made, train on it again."""
