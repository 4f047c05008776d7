"""`slipstream diagnose`: checks with verdicts and remedies, and bug report bundles."""
