"""The store in memory: the same operations as the Redis store, checked by the same contract tests."""
