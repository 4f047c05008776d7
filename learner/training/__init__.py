"""One training step: trainer, objective, critic, and frozen models."""
