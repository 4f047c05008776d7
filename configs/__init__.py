"""Settings of a run: typed records, YAML presets, and the loader that composes them."""
