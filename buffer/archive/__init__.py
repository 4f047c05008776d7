"""The archive: groups that are over, in Parquet shards that any tool can read."""
