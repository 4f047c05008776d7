"""Supervised fine-tuning, mode=sft."""
