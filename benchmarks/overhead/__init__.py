"""Cost of the machinery: generator and learner, each bare, wrapped and whole."""
