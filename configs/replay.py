"""Training from stored rollouts."""

from configs.base import Config


class ReplayConfig(Config):
    """What `mode=replay` trains from."""

    path: str = ""
    """Archive folder of a run, such as `runs/mine/archive`."""
