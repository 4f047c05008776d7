"""What is kept, for how long, and who may have it. Loads without torch."""
