"""What a run is: typed records, the Hydra files that fill them, and the loader between the two."""
