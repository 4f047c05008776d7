"""Rewards: what a response is worth, computed in processes that can be killed."""
