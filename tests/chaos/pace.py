"""Pace: how fast a tormented run lives, which depends on how long its generators take to start."""

from typing import Literal

from slipstream.buffer.trajectory import Record

EngineKind = Literal["scripted", "vllm"]


class Pace(Record):
    """Settings and times that fit together. Example: PACES["scripted"]."""

    engine: list[str]
    """Overrides that choose the generators' engine."""
    has_cold_generators: bool
    """Whether they need an interpreter that has imported nothing, which can be told its environment."""
    patience_s: float
    """After it, leases and claims lapse and members of a broadcast are evicted."""
    longest_gap_s: float
    """Between two strikes; on average half of it."""
    spare_at_most_s: float
    """How long a sparing strike waits for everybody to work again."""
    steps_per_kill: int
    """So many steps has the run, that it lasts about as long as its torment."""


PACES: dict[EngineKind, Pace] = {
    "scripted": Pace(
        engine=["generators/engine=scripted", "generators.engine.seconds_per_token=0.03"],
        has_cold_generators=False,
        patience_s=2.0,
        longest_gap_s=1.0,
        spare_at_most_s=5.0,
        steps_per_kill=3,
    ),
    "vllm": Pace(
        engine=["generators/engine=vllm"],
        has_cold_generators=True,
        patience_s=10.0,
        longest_gap_s=10.0,
        spare_at_most_s=120.0,
        steps_per_kill=80,
    ),
}
