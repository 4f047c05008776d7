"""Guests: generators on machines that nobody of the run controls, whose answers are checked by sample."""
