"""The cost of the machinery: each side of a run bare, wrapped and whole."""
