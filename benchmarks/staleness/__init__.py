"""Final accuracy of each off-policy correction by staleness."""
