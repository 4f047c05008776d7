"""The objective: from a batch to losses."""
