"""`slipstream diagnose`: checks of a machine, each with a verdict and a remedy."""
