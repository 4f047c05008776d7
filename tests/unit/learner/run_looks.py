"""Looks at a run, made by hand: what a waiting learner would have read from its store."""

from typing import Any

import msgspec

from slipstream.broker.status.role_status import RoleStatus
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.memory.store import MemoryStore
from slipstream.learner.stall.progress import GeneratorProgress, RunProgress


class FakeClock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_role(name: str, role: str = "generator", **overrides: Any) -> RoleStatus:
    """A living role that is ready at version 0."""
    fields: dict[str, Any] = {
        "name": name,
        "role": role,
        "liveness": "alive",
        "state": "ready",
        "report_age_s": 0.5,
        "progress_age_s": None,
        "reason": "",
        "version": 0,
    }
    return RoleStatus(**(fields | overrides))


def make_generator(
    name: str = "generator-0", *, trajectories: int = 0, rewards_failed: int = 0, **overrides: Any
) -> GeneratorProgress:
    """One that lives, holds version 0 and has had a reward for every trajectory."""
    return GeneratorProgress(make_role(name, rewards_failed=rewards_failed, **overrides), trajectories)


def make_counts(**overrides: Any) -> StoreCounts:
    """Of a store in which nothing has happened yet."""
    store = MemoryStore()
    store.open_run("test", config_json="{}", num_rows=4, seed=0)
    return msgspec.structs.replace(store.counts(), **overrides)


def make_look(
    *generators: GeneratorProgress,
    version: int = 0,
    broker: RoleStatus | None = None,
    capacity_reason: str = "",
    answered: int | None = None,
    **counts: Any,
) -> RunProgress:
    """The broker lives, unless told otherwise."""
    return RunProgress(
        make_counts(**counts),
        version,
        generators=generators,
        broker=broker or make_role("broker", "broker", version=None),
        capacity_reason=capacity_reason,
        answered=answered,
    )
