"""Training engines: DeepSpeed and plain torch."""
