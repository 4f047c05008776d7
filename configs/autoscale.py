"""Autoscale: how many generators a launcher keeps, by which side waits for the other."""

from typing import Annotated

from msgspec import Meta

from configs.base import Config


class AutoscaleConfig(Config):
    """Between `min` and `max` generators, one more or less at a time."""

    min: Annotated[int, Meta(ge=1)] = 1
    """Fewest."""
    max: Annotated[int, Meta(ge=1)] = 4
    """Most."""
    more_above: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """One more when the learner waits for groups for a larger share of its time."""
    fewer_below: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """One less when the generators run a smaller share of what they could together, and one less could still run it."""
    settle_s: Annotated[float, Meta(gt=0)] = 60.0
    """Time that is measured before each change, seconds; begins when the learner and all generators are at work."""
    absent_after_s: Annotated[float, Meta(gt=0)] = 600.0
    """A generator that is not at work for longer is waited for no more: the others are measured without it, seconds."""
