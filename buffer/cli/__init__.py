"""The commands of `python -m buffer`: look into a live store or an archive, with the same filters."""
