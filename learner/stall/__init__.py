"""Stall detection: progress of a run, causes of a stall, and the detector that acts on them."""
