"""Strikes: who is hit, how, and after how long; all of it follows from one seed."""

import random
from collections.abc import Iterator
from typing import Literal

from slipstream.buffer.trajectory import Record

Blow = Literal["kill", "terminate", "stop"]
"""SIGKILL | SIGTERM | SIGSTOP, and SIGCONT a while later."""

_ROLES = {"broker": 2, "learner": 2, "store": 2, "generator": 4}
_BLOWS: dict[Blow, int] = {"kill": 16, "terminate": 2, "stop": 3}
_LONGEST_STOP_S = 5.0
"""Beyond the patience of everybody's peers: who goes on after that has been given up."""
_SPARING = 0.3
"""Share of the strikes that let everybody recover first: the others hit a run that is still on its knees."""


class Strike(Record):
    """One blow. Example: Strike(role="broker", blow="kill", is_sparing=False, gap_s=0.71, stopped_s=0.0)."""

    role: str
    """Whom it hits."""
    blow: Blow
    """With what."""
    is_sparing: bool
    """Whether it waits until everybody works again after the strikes before."""
    gap_s: float
    """Since then, or else since the strike before, seconds."""
    stopped_s: float
    """From SIGSTOP to SIGCONT, seconds; 0 for the other blows."""


def draw_strikes(*, seed: int, kills: int, generators: list[str], longest_gap_s: float) -> Iterator[Strike]:
    """Strikes until `kills` of them have ended a process; those that only stop one come on top."""
    chance = random.Random(seed)
    while kills > 0:
        (kind,) = chance.choices(list(_ROLES), list(_ROLES.values()))
        (blow,) = chance.choices(list(_BLOWS), list(_BLOWS.values()))
        kills -= blow != "stop"
        yield Strike(
            role=chance.choice(generators) if kind == "generator" else kind,
            blow=blow,
            is_sparing=chance.random() < _SPARING,
            gap_s=chance.uniform(0, longest_gap_s),
            stopped_s=chance.uniform(0, _LONGEST_STOP_S) if blow == "stop" else 0.0,
        )
