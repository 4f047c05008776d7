"""`slipstream explain`: answers from what a run recorded: its settings, metrics, step ledger and trajectories."""
