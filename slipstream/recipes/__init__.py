"""`slipstream launch`: what Slurm and Kubernetes start a run with, from its settings."""
