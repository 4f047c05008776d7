"""Monitor: polls the state of a run from its store alone."""

from typing import Any

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import METRICS_KEPT, RunState
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Record
from slipstream.configs.run import RunConfig

_RECENT_STEPS = 20


class RunSnapshot(Record):
    """State of a run at one moment."""

    state: RunState
    counts: StoreCounts
    roles: dict[str, dict[str, Any]]
    """Newest gauges by the name of the role."""
    rows: list[dict[str, Any]]
    """The newest metrics rows, as many as the store keeps, oldest first."""
    new_rows: list[dict[str, Any]]
    """Rows added since the previous snapshot."""
    eta_s: float | None
    """Seconds to `max_steps` at the current pace; None before the second step."""

    @property
    def last(self) -> dict[str, Any]:
        """The newest row; empty before the first."""
        return self.rows[-1] if self.rows else {}

    def newest(self, key: str) -> float | None:
        """Return the newest value of a metric that not every row has; None without one."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    @property
    def living_generators(self) -> set[str]:
        """Names of the generators that have not left."""
        return {name for name, g in self.roles.items() if g.get("role") == "generator" and _is_alive(g)}

    def describe_waits(self) -> str:
        """Return one line that names the waiting roles and their reasons; empty if none waits."""
        waiting = [
            f"{name}: {g.get('reason')}"
            for name, g in sorted(self.roles.items())
            if g.get("waits_for") and _is_alive(g)
        ]
        return "; ".join(waiting)


class Monitor:
    """Takes snapshots of a run, and keeps the newest metrics rows."""

    def __init__(self, store: Store, run: RunConfig) -> None:
        self._store = store
        self._run = run
        self._rows: list[dict[str, Any]] = []
        self._last = 0

    def poll(self) -> RunSnapshot:
        """Take a snapshot. Raises StoreUnavailableError."""
        new = self._store.metrics(after=self._last)
        self._last = new.last
        self._rows = [*self._rows, *new.rows][-METRICS_KEPT:]
        return RunSnapshot(
            state=self._store.run_state(),
            counts=self._store.counts(),
            roles=self._store.roles(),
            rows=self._rows,
            new_rows=new.rows,
            eta_s=self._eta_s(),
        )

    def _eta_s(self) -> float | None:
        recent = _since_rollback(self._rows[-_RECENT_STEPS:])
        if len(recent) < 2:
            return None
        first, last = recent[0], recent[-1]
        pace = (last["time_s"] - first["time_s"]) / (last["step"] - first["step"])
        return pace * (self._run.learner.max_steps - last["step"])


def _since_rollback(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest rows with increasing steps: after a rollback the same steps are trained again."""
    starts = [i for i in range(1, len(rows)) if rows[i]["step"] <= rows[i - 1]["step"]]
    return rows[starts[-1] if starts else 0 :]


def _is_alive(gauges: dict[str, Any]) -> bool:
    return gauges.get("state") != "gone"
