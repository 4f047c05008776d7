"""How weights travel. One transport per file, both ends in it."""
