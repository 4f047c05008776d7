"""Places where roles run: keepers, seats on this machine and on others."""
