"""`slipstream diagnose`: checks, each with a verdict and a remedy, and the bundle of a bug report."""
