"""Runs whose generators join and leave, or differ in speed."""
