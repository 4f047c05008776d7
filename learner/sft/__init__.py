"""Supervised fine-tuning (mode=sft): demonstrations, trainer, and run."""
