"""Commands on stored trajectories: `python -m buffer`, also `slipstream data`."""
