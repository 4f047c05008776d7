"""The archive: finished groups in Parquet shards that any tool can read."""
