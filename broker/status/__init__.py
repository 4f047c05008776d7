"""Status of a run: gauges of roles, who waits for whom, the terminal views."""
