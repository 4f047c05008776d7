"""Training engines on DeepSpeed and on plain torch."""
