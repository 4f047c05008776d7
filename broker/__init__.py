"""Everything that travels between processes: messages, channels, router, pacing, membership, weight transports."""
