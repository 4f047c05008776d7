"""The store in memory: the same operations as the Redis store, under the same contract tests."""
