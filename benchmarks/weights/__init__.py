"""Weight updates: size of deltas, length of pauses, killed members, planted faults."""
