"""Redis store: client, scripts, embedded server."""
