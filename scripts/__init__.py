"""Programs beside the run: data and models to start from, checks of a user's formula, tables of the documentation."""
