"""Programs beside the run: data and models to start from, the config on paper, the curve of a run."""
