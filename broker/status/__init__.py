"""Status of a run: gauges of the roles, which role blocks which, the terminal views."""
