"""Programs outside a run: data, models, checks of formulas."""
