"""In-memory store for runs in one process; the twin of the Redis store."""
