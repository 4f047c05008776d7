"""Weight transports, one per module with both of its ends, and the snapshots that generators fetch."""
