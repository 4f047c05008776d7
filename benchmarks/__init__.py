"""What the machinery costs and what it gains, measured."""
