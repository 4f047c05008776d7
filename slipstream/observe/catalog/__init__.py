"""The catalog of stored trajectories, and `slipstream data`."""
