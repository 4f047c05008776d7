"""Tests on a GPU, in a process of their own: `make gpu-check`."""
