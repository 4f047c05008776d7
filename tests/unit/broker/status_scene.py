"""A run as a store tells it, for the tests of its status: three generators, one silent, one gone."""

from typing import Any

from slipstream.broker.status.monitor import Monitor
from slipstream.broker.status.run_status import RunStatus, make_status
from slipstream.buffer.memory.store import MemoryStore
from slipstream.buffer.records import Event
from slipstream.configs.run import RunConfig
from tests.builders import make_run

NOW = 1000.0
RUN = make_run(generators={"max_concurrency": 64}, learner={"groups_per_step": 2, "max_steps": 40})
ROW = {
    "step": 3,
    "time_s": 9.0,
    "learner/reward_mean": 0.5,
    "lag/mean": 1.5,
    "lag/max": 2,
    "generators/tokens_per_s": 1000.0,
    "learner/tokens_per_s": 900.0,
    "learner/wait_s": 1.0,
    "learner/train_s": 2.5,
    "learner/publish_s": 0.5,
}


def generator(pid: int = 7, **gauges: Any) -> dict[str, Any]:
    told = {
        "role": "generator",
        "state": "ready",
        "version": 3,
        "host": "node",
        "pid": pid,
        "running": 32,
        "reason": "",
    }
    return told | gauges


def roles() -> dict[str, tuple[float, dict[str, Any]]]:
    """Name -> (seconds since its report, gauges)."""
    return {
        "broker": (0.5, {"role": "broker", "state": "ready", "reason": "", "host": "node", "pid": 1}),
        "learner": (
            0.5,
            {"role": "learner", "state": "ready", "version": 3, "tokens": 5.0, "reason": "training step 4"},
        ),
        "launcher": (0.1, {"role": "launcher", "state": "ready", "restarts": {"generator-0": 2}}),
        "generator-0": (
            0.5,
            generator(version=2, tokens=9.0, tokens_per_s=5210.25, reason="pacing: wait", waits_for="prompts"),
        ),
        "generator-1": (90.0, generator(version=1)),
        "generator-2": (300.0, {"role": "generator", "state": "gone", "reason": "said bye"}),
    }


def look(
    reported: dict[str, tuple[float, dict[str, Any]]] | None = None,
    *,
    run: RunConfig = RUN,
    phase: str = "training",
    ready_versions: dict[int, int] | None = None,
    events: list[Event] | None = None,
    rows: tuple[dict[str, Any], ...] = (),
) -> RunStatus:
    """The status of a run whose roles said this."""
    clock = [0.0]
    store = MemoryStore(clock=lambda: clock[0])
    store.open_run("test", config_json="{}", num_rows=4, seed=0)
    store.announce_version(3)
    store.set_phase(phase)
    for row in rows:
        store.append_metrics(row)
    for name, (age_s, gauges) in (roles() if reported is None else reported).items():
        clock[0] = NOW - age_s
        store.report_role(name, gauges)
    snapshot = Monitor(store, run).poll()
    return make_status(snapshot, run=run, now=NOW, ready_versions=ready_versions or {}, events=events or [])
