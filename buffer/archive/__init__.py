"""The archive: groups that are over, as Parquet shards that any tool can read."""
