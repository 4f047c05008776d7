"""The replay buffer: durable state of a run, its store, its archive. Loads without torch."""
