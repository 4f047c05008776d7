"""Weight transports, both ends of each in one module, and the snapshots that generators fetch."""
