"""Training: trainer, critic, frozen models."""
