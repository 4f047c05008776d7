"""Runs with generators that join and leave, or differ in speed."""
