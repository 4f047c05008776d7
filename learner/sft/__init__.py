"""Supervised fine-tuning: demonstrations, their trainer, and the run of mode=sft."""
