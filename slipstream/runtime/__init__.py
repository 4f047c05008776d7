"""Process-level services shared by all roles: clock, logs, signals, exit codes, run folder."""
