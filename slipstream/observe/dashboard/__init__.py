"""`slipstream watch`: runs in a web browser."""
