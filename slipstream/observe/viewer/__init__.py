"""`slipstream view`: trajectories in the terminal."""
