"""The in-memory store: same operations as the Redis store, for one process, and the oracle of its tests."""
