"""LiveRun: a run folder with a real store. Its roles are threads that report, die, and answer on command."""

import threading
from pathlib import Path
from typing import Any

import msgspec

from slipstream.buffer.control import GENERATORS
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder
from tests.contract.stores import lease, make_ready, open_run
from tests.recorded_run import append_rows, make_row, record_run

_REPORT_EVERY_S = 0.2


class LiveRun:
    """Life: start -> (step | kill | end of the store)* -> stop."""

    def __init__(self, runs_dir: Path, config: RunConfig, *, steps: int) -> None:
        self.path = record_run(runs_dir, config.name, steps=steps)
        (self.path / "config.yaml").write_bytes(msgspec.yaml.encode(config))
        (self.path / "summary.json").unlink()
        self.steps = steps
        self._folder = RunFolder(config)
        self._folder.lock()
        self.server = EmbeddedRedis(self._folder.store, max_memory_mib=64)
        self.server.start(timeout_s=20)
        self.store = open_run_store(self.server.url, config.name, timeout_s=5)
        open_run(self.store, config_json=msgspec.json.encode(config).decode())
        self.store.set_phase("training")
        make_ready(self.store, 3)
        lease(self.store, 1)
        self.alive = {"broker", "learner", LAUNCHER, "generator-0", "generator-1"}
        self.requests: list[str] = []
        self._target, self._answer = 2, {"answered": "", "refusal": ""}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)
        self._thread.start()

    def _report(self) -> None:
        while not self._ending.wait(_REPORT_EVERY_S):
            if LAUNCHER in self.alive:
                self._take_requests()
            for name in sorted(self.alive):
                self.store.report_role(name, self._gauges(name))

    def _take_requests(self) -> None:
        for subject, value in self.store.take_requests("launcher").items():
            number, _, request_id = value.partition(" ")
            self.requests.append(f"{subject} {number}")
            if subject == GENERATORS:
                self._target, self._answer = int(number), {"answered": request_id, "refusal": ""}
        self.requests += self.store.take_requests("broker")

    def _gauges(self, name: str) -> dict[str, Any]:
        where = {"state": "ready", "host": "node-1", "pid": 4711, "reason": ""}
        if name == LAUNCHER:
            return where | {"role": LAUNCHER, "restarts": {}, "generators_target": self._target, **self._answer}
        if not name.startswith("generator"):
            return where | {"role": name, "version": self.steps, "tokens": 5.0 * self.steps, "tokens_per_s": 4900.0}
        rates = {"version": 0, "tokens": 9.0 * self.steps, "tokens_per_s": 2600.0}
        return where | rates | {"role": "generator", "running": 40, "max_concurrency": 64, "kv_usage": 0.42}

    def step(self, **values: Any) -> int:
        """Make a step and return its number."""
        self.steps += 1
        append_rows(self.path, make_row(self.steps, **values))
        return self.steps

    def kill(self, name: str) -> None:
        """Silence a role."""
        self.alive.discard(name)

    def release(self) -> None:
        """Release the run, as its launcher does when it dies."""
        self._folder.unlock()

    def kill_store(self) -> None:
        self._ending.set()
        self._thread.join(timeout=10)
        self.server.stop()

    def stop(self) -> None:
        self.kill_store()
        self.store.close()
        self.release()
