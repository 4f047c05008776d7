"""Agent loops: from a leased prompt to a scored trajectory."""
