"""Programs outside a run: data and models to start from, checks of a user's formula."""
