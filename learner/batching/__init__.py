"""From claimed groups to microbatches."""
