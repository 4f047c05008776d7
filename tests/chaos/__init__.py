"""Chaos: real roles as real processes, randomly killed, stopped, and continued, then audited."""
