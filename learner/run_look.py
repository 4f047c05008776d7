"""RunLook: what one look at the store tells a learner that waits."""

from dataclasses import dataclass
from typing import Any

from broker.pacing import capacity_reason
from broker.role_status import RoleStatus, role_statuses
from buffer.books import StoreCounts
from buffer.store import Store
from configs.run import RunConfig


@dataclass(frozen=True, slots=True)
class GeneratorLook:
    """One generator that ever reported."""

    status: RoleStatus
    """How it is."""
    trajectories: int | None = None
    """Finished since it started; None for one that does not say (any more)."""

    @property
    def is_starting(self) -> bool:
        """Whether it lives and may still come to hold weights by itself: it loads its model or fetches them."""
        return self.status.is_alive and (self.status.state == "starting" or self.status.waits_for == "transfer")

    @property
    def is_holding(self) -> bool:
        """Whether it lives and works with verified weights."""
        return self.status.is_alive and self.status.state in ("ready", "updating") and self.status.version is not None


@dataclass(frozen=True, slots=True)
class RunLook:
    """The run, now."""

    counts: StoreCounts
    """Where everything is."""
    announced_version: int
    """The newest the learner has made."""
    generators: tuple[GeneratorLook, ...] = ()
    """All that ever reported, by name."""
    broker: RoleStatus | None = None
    """None when none has ever reported."""
    capacity_reason: str = ""
    """Why the store has no room for more; empty when it has."""
    answered: int | None = None
    """Answers of the evaluation that is waited for; None when groups are."""

    @property
    def living(self) -> list[GeneratorLook]:
        """Generators that were reported of lately."""
        return [generator for generator in self.generators if generator.status.is_alive]

    @property
    def holding(self) -> list[GeneratorLook]:
        """Those with verified weights."""
        return [generator for generator in self.generators if generator.is_holding]


def look_at(store: Store, run: RunConfig, *, answered: int | None = None) -> RunLook:
    """Read it. Raises StoreUnavailable."""
    counts, told, version = store.counts(), store.roles(), store.run_state().announced_version
    statuses = role_statuses(told, run=run, now=store.now(), announced_version=version)
    return RunLook(
        counts,
        version,
        generators=tuple(_generator(each, told[each.name]) for each in statuses if each.role == "generator"),
        broker=next((each for each in statuses if each.role == "broker"), None),
        capacity_reason=capacity_reason(run.buffer.capacity, counts),
        answered=answered,
    )


def _generator(status: RoleStatus, gauges: dict[str, Any]) -> GeneratorLook:
    trajectories = gauges.get("trajectories")
    return GeneratorLook(status, int(trajectories) if isinstance(trajectories, int | float) else None)
