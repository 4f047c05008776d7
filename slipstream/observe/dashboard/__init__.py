"""`slipstream watch`: runs in a web browser, live and finished, from their stores and folders."""
