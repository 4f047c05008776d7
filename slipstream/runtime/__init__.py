"""Services that all roles share: clock, logs, signals, exit codes, run folder."""
