"""Comparison with other trainers: same checkpoint, data, reward, learning rate, and machine, in turn."""
