"""From a prompt to a scored trajectory."""
