"""Harness: starts the roles, strikes and restarts them, and lets the run finish."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from tests.chaos.guard import start_guard
from tests.chaos.outcome import Outcome, read_archive, read_lineage
from tests.chaos.processes import ColdProcess, Process, StoreProcess, WarmProcess
from tests.chaos.role import Progress, Role, Strike, draw_strikes
from tests.chaos.stage import NAME, Stage

_TICK_S = 0.02
_READ_EVERY_S = 0.04
_STORE_TIMEOUT_S = 10.0
_RESTART_TIMEOUT_S = 60.0
_GUARD_TIMEOUT_S = 30.0


class Harness:
    """Owner of all processes of a run. Life: start -> strike -> settle -> outcome -> end."""

    def __init__(self, stage: Stage, *, num_generators: int, is_cold: bool) -> None:
        """`is_cold`: start every role with a fresh interpreter."""
        self._stage = stage
        self._is_cold = is_cold
        self.roles = {role.name: role for role in self._make_roles(num_generators)}
        """Roles by name; the store comes first."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._store: RedisStore | None = None
        self._num_reads = 0
        self._next_read_at = 0.0
        self.newest_step = 0
        """Newest step seen in the store."""

    @property
    def num_recoveries(self) -> int:
        """Recoveries of all roles."""
        return sum(len(role.recovery.seconds) for role in self.roles.values())

    @property
    def crashes(self) -> list[str]:
        """One sentence per bug that ended a role."""
        return [sentence for role in self.roles.values() for sentence in role.crashes]

    @property
    def store(self) -> RedisStore:
        """The run's store, as any observer opens it."""
        assert self._store is not None, "start() comes first"
        return self._store

    def start(self, *, timeout_s: float) -> None:
        """Start all roles, the store first; block until the first step is done. Raises TimeoutError."""
        self._guard = start_guard(self._stage.folder)
        self._stage.hold_file.touch()
        for role in self.roles.values():
            role.start(time.monotonic())
        self._store = open_run_store(self._stage.store.url, NAME, timeout_s=_STORE_TIMEOUT_S)
        if not self._poll_until(lambda: self.newest_step > 0, timeout_s=timeout_s):
            raise TimeoutError(f"the first step must be done within {timeout_s:g} s, {self._last_lines()}")

    def strike(self, *, seed: int, kills: int, minutes: float) -> Iterator[Strike]:
        """Deliver the strikes of a seed until `kills` processes have ended or the time is up; yields each one."""
        generators = [name for name in self.roles if name.startswith("generator")]
        pace = self._stage.pace
        ends_at = time.monotonic() + 60 * minutes
        for strike in draw_strikes(seed=seed, kills=kills, generators=generators, max_gap_s=pace.max_gap_s):
            if strike.is_after_recovery:
                self._poll_until(self._is_recovered, timeout_s=pace.max_recovery_s)
            self._poll_until(lambda: False, timeout_s=strike.gap_s)
            role = self.roles[strike.role]
            self._poll_until(lambda role=role: role.is_alive, timeout_s=_RESTART_TIMEOUT_S)
            if time.monotonic() >= ends_at:
                return
            role.strike(strike, time.monotonic())
            yield strike

    def settle(self, *, timeout_s: float) -> None:
        """Let the run finish without strikes. Raises TimeoutError with the last line of every role."""
        self._stage.hold_file.unlink(missing_ok=True)
        learner = self.roles["learner"]
        if not self._poll_until(lambda: learner.has_finished and self._is_archived(), timeout_s=timeout_s):
            raise TimeoutError(f"the run must end {timeout_s:g} s after the last strike, {self._last_lines()}")

    def outcome(self) -> Outcome:
        """Everything that the run has left. Raises ReplayBufferError when the store does not answer."""
        newest = self.store.run_state().checkpoint
        trained = read_lineage(self._stage.run_folder / "checkpoints" / newest.name) if newest else []
        archived, check = read_archive(self._stage.run_folder / "archive")
        return Outcome(self.store.audit(), self.store.counts(), self.store.ledger(), trained, archived, check)

    def end(self) -> None:
        """Kill the roles that are left, the store last."""
        for role in reversed(self.roles.values()):
            role.end()
        if self._guard and self._guard.stdin:
            self._guard.stdin.close()
            self._guard.wait(_GUARD_TIMEOUT_S)

    def clear(self) -> None:
        """Remove the run's folder."""
        with suppress(OSError):
            shutil.rmtree(self._stage.folder)

    def _is_recovered(self) -> bool:
        # While the learner holds the last step, no role has work left that would show its recovery.
        is_held = self.newest_step >= self._stage.steps - 1
        return is_held or not any(role.recovery.is_pending for role in self.roles.values())

    def _is_archived(self) -> bool:
        try:
            return self.store.counts().unarchived == 0
        except ReplayBufferError:
            return False

    def _last_lines(self) -> str:
        return "last lines: " + "; ".join(f"{role.name}: {role.process.last_line}" for role in self.roles.values())

    def _poll_until(self, is_met: Callable[[], bool], *, timeout_s: float) -> bool:
        """Poll all roles until the condition is met, at most `timeout_s`; returns whether it is."""
        ends_at = time.monotonic() + timeout_s
        while not is_met():
            if time.monotonic() >= ends_at:
                return False
            self._poll()
            time.sleep(_TICK_S)
        return True

    def _poll(self) -> None:
        for role in self.roles.values():
            role.poll(time.monotonic())
        # A stopped store would block the harness, which has to continue it.
        if time.monotonic() < self._next_read_at or self.roles["store"].is_stopped:
            return
        self._next_read_at = time.monotonic() + _READ_EVERY_S
        try:
            progress = self._read_progress()
        except ReplayBufferError:
            progress = {}
        if steps := progress.get("learner"):
            self.newest_step = steps[0]
        for name, role in self.roles.items():
            role.observe(progress.get(name), time.monotonic())

    def _read_progress(self) -> dict[str, Progress]:
        self._num_reads += 1
        counts, gauges = self.store.counts(), self.store.roles()
        # Only a broker accepts trajectories and leases new prompts; only a learner advances the step.
        arrived = counts.accepted + counts.duplicates + counts.superseded
        progress: dict[str, Progress] = {
            "store": (self._num_reads,),
            "broker": (arrived + counts.admitted,),
            "learner": (self.store.run_state().step,),
        }
        for name, role in self.roles.items():
            own = gauges.get(name, {})
            # The gauges of a predecessor stay in the store until the new process reports.
            if name not in progress and own.get("pid") == role.process.pid:
                progress[name] = (int(own.get("trajectories", 0) - own.get("outbox", 0)),)
        return progress

    def _make_roles(self, num_generators: int) -> Iterator[Role]:
        stage = self._stage
        yield Role("store", StoreProcess(stage.store), initial=(0,))
        yield Role("broker", self._process("broker", "slipstream.broker.__main__", stage.settings))
        learner = self._process("learner", "tests.chaos.scripted_learner", stage.settings)
        yield Role("learner", learner, may_finish=True)
        for number in range(num_generators):
            name, module = f"generator-{number}", "slipstream.generators.__main__"
            arguments = ["--id", name, stage.address]
            generator = self._process(name, module, arguments, is_cold=stage.pace.has_cold_generators)
            yield Role(name, generator, initial=(0,))

    def _process(self, name: str, module: str, arguments: list[str], *, is_cold: bool = False) -> Process:
        kind = ColdProcess if is_cold or self._is_cold else WarmProcess
        return kind(module, arguments, cwd=self._stage.folder, log=self._stage.logs / f"{name}.log")
