"""Harness: starts, strikes, and restarts the roles, and lets the run finish."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.errors import ArchiveError, ReplayBufferError
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from tests import runs
from tests.chaos import state_audit
from tests.chaos.acts import Acts
from tests.chaos.delivery_audit import find_delivery_problems
from tests.chaos.outcome import Evidence, Outcome, Stored, Times, find_problems, read_archive, read_lineage
from tests.chaos.processes import ColdProcess, Process, StoreProcess, WarmProcess, start_guard
from tests.chaos.role import Progress, Role, Strike, draw_strikes
from tests.chaos.stage import ALLOWED_REFUSALS, NAME, PEER_TIMEOUT_S, Stage
from tests.chaos.watched.journal import Journal, read_journals

_TICK_S = 0.02
_STORE_TIMEOUT_S = 10.0
_RESTART_TIMEOUT_S = 60.0
_GUARD_TIMEOUT_S = 30.0
_LIAR = 2
_MAX_NAMED = 5
_AUDIT_EVERY_S = 0.5
_LAST_S = 0.5
_ANSWER_S = 20.0
"""Longest wait for the last answers after the run's end, because a disconnected peer rejoins after a timeout."""
_MAX_EXITS = 5
"""Exits without a strike before the harness gives up on a role."""


class Harness:
    """Owner of all processes of a run. Life: start -> strike -> settle -> outcome -> end."""

    def __init__(self, stage: Stage, *, num_generators: int, is_cold: bool) -> None:
        self.stage = stage
        self._is_cold = is_cold
        self.journal = Journal(stage.journals, "harness")
        self.archive_problems: list[str] = []
        self.state_problems: dict[str, None] = {}
        self._next_audit_at = 0.0
        self.stored: list[Stored] = []
        self.missed_acts: list[str] = []
        self._most_consumed = 0
        self._admitted: int | None = None
        self.roles = {role.name: role for role in self._make_roles(num_generators)}
        """Roles by name; the store comes first."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._store: RedisStore | None = None
        self._num_reads = 0
        self._next_read_at = 0.0
        self.newest_step = 0

    @property
    def store(self) -> RedisStore:
        assert self._store is not None, "start() comes first"
        return self._store

    def start(self, *, timeout_s: float) -> None:
        """Start all roles, the store first; block until the first step is done. Raises TimeoutError."""
        self._guard = start_guard(self.stage.folder)
        self.stage.hold_file.touch()
        config, broker = self.stage.run_folder / "config.yaml", self.roles["broker"].process
        for role in self.roles.values():
            if role.name.startswith("generator"):
                # Behind a relay, they find the token only in the run folder.
                has_token = lambda: broker.exit_code is not None or config.exists()  # noqa: E731
                self.poll_until(has_token, timeout_s=timeout_s, watches=False)
            role.start(time.monotonic())
        self._store = open_run_store(self.stage.store.url, NAME, timeout_s=_STORE_TIMEOUT_S)
        is_hopeless = lambda: any(each.unexpected_exits.total() > _MAX_EXITS for each in self.roles.values())  # noqa: E731
        self.poll_until(lambda: self.newest_step > 0 or is_hopeless(), timeout_s=timeout_s)
        if not self.newest_step:
            raise TimeoutError(f"the first step must be done within {timeout_s:g} s, {self.last_lines}")

    def strike(self, *, seed: int, kills: int, minutes: float) -> Iterator[Strike]:
        """Deliver the strikes of a seed until `kills` processes have ended or time is up; yield each."""
        generators = [name for name in self.roles if name.startswith("generator")]
        pace = self.stage.pace
        ends_at = time.monotonic() + 60 * minutes

        def is_recovered() -> bool:
            # While the learner holds the last step, no role has work that would show its recovery.
            is_held = self.newest_step >= self.stage.steps - 1
            return is_held or not any(role.recovery.is_pending for role in self.roles.values())

        for strike in draw_strikes(seed=seed, kills=kills, generators=generators, max_gap_s=pace.max_gap_s):
            if strike.is_after_recovery:
                self.poll_until(is_recovered, timeout_s=pace.max_recovery_s)
            self.poll_until(lambda: False, timeout_s=strike.gap_s)
            role = self.roles[strike.role]
            self.poll_until(lambda role=role: role.is_alive, timeout_s=_RESTART_TIMEOUT_S)
            if time.monotonic() >= ends_at:
                return
            role.strike(strike, time.monotonic())
            yield strike

    def act(self, *, seed: int, kills: int) -> Iterator[str]:
        """Play the acts of a seed and random strikes until `kills` processes have ended; yields each one's name."""
        acts = Acts(self, seed=seed)
        self.missed_acts = acts.missed
        for act in acts.schedule(kills):
            if self.roles["learner"].has_finished:
                return
            self.journal.write("act", name=act.name)
            act.play()
            yield act.name

    def check_archive(self) -> None:
        with suppress(ArchiveError):
            archive = Archive(self.stage.run_folder / "archive")
            self.archive_problems += [f"a dead broker left this: {problem}" for problem in archive.check().problems]

    def settle(self, *, timeout_s: float) -> None:
        """Let the run finish without strikes. Raises TimeoutError with the last line of every role."""
        self.stage.hold_file.unlink(missing_ok=True)
        learner = self.roles["learner"]
        is_over = lambda: learner.has_finished and self._is_archived()  # noqa: E731
        # Any loss eventually stalls the run permanently.
        ends_at, step, stalls_at = time.monotonic() + timeout_s, -1, 0.0
        while not self.poll_until(is_over, timeout_s=_TICK_S):
            if self.newest_step != step:
                step, stalls_at = self.newest_step, time.monotonic() + self.stage.pace.max_stall_s
            if time.monotonic() > min(ends_at, stalls_at):
                break
        if not is_over():
            limits = f"{timeout_s:g} s after the last strike, and do a step within {self.stage.pace.max_stall_s:g} s"
            raise TimeoutError(f"the run must end {limits}, {self.last_lines}")
        generators = [name for name in self.roles if name.startswith("generator")]
        is_answered = lambda: not any(self.store.roles().get(name, {}).get("outbox") for name in generators)  # noqa: E731
        self.poll_until(is_answered, timeout_s=_ANSWER_S)
        self.poll_until(lambda: False, timeout_s=_LAST_S)
        self._audit_state()
        self.journal.write("end")

    def outcome(self) -> Outcome:
        """Collect the final records of the run. Raises ReplayBufferError if the store does not answer.

        Raises FileNotFoundError when the checkpoint that the store points at is gone.
        """
        state = self.store.run_state()
        newest = state.checkpoint
        trained = read_lineage(self.stage.run_folder / "checkpoints" / newest.name) if newest else []
        self.stored, check = read_archive(self.stage.run_folder / "archive")
        groups = {each.sample[0] for each in self.stored}
        return Outcome(
            runs.audited(self.store, self.stage.run_folder / "archive"),
            self.store.counts(),
            whole_ledger(self.store, Archive(self.stage.run_folder / "archive")),
            trained,
            [each.sample for each in self.stored if each.outcome == "retired"],
            check,
            rejected=[each.sample for each in self.stored if each.outcome != "retired"],
            consumed=state.consumed,
            skipped=[ordinal for ordinal in range(state.next_ordinal) if str(ordinal) not in groups],
            allowed_refusals=ALLOWED_REFUSALS,
        )

    def verdict(self, *, timeout_s: float) -> tuple[Outcome | None, list[str]]:
        """Let the run finish; return (outcome, or None if the store could not be read; problems)."""
        problems = []
        try:
            self.settle(timeout_s=timeout_s)
        except TimeoutError as error:
            problems = [str(error)]
        try:
            outcome = self.outcome()
        except (ReplayBufferError, FileNotFoundError) as error:
            return None, [*problems, f"the store and the newest checkpoint must be there at the end: {error}"]
        expected = self.stage.expected(rejected=outcome.num_rejected, skipped=outcome.skipped)
        problems += [sentence for role in self.roles.values() for sentence in role.crashes]
        problems += find_problems(outcome, steps=self.stage.steps, expected=expected)
        return outcome, problems + self._delivery_problems(outcome)

    def _delivery_problems(self, outcome: Outcome) -> list[str]:
        lives, max_lag = read_journals(self.stage.journals), self.stage.pace.max_lag
        times = Times(lease_s=self.stage.pace.lapse_after_s, peer_timeout_s=PEER_TIMEOUT_S)
        records = {"stored": self.stored, "lineage": outcome.lineage, "skipped": outcome.skipped}
        evidence = Evidence(lives, times=times, max_lag=max_lag, **records)
        seen = [*self.archive_problems[:_MAX_NAMED], *list(self.state_problems)[:_MAX_NAMED]]
        return [*seen, *state_audit.find_end_problems(self._read_state(), lives), *find_delivery_problems(evidence)]

    def end(self) -> None:
        for role in reversed(self.roles.values()):
            role.end()
        if self._guard and self._guard.stdin:
            self._guard.stdin.close()
            self._guard.wait(_GUARD_TIMEOUT_S)

    def _is_archived(self) -> bool:
        try:
            return self.store.counts().unarchived == 0
        except ReplayBufferError:
            return False

    @property
    def last_lines(self) -> str:
        return "last lines: " + "; ".join(f"{role.name}: {role.process.last_line}" for role in self.roles.values())

    def poll_until(self, is_met: Callable[[], bool], *, timeout_s: float, watches: bool = True) -> bool:
        """Poll all roles, if it `watches`, until the condition is met, at most `timeout_s`; returns whether it is."""
        ends_at = time.monotonic() + timeout_s
        while not is_met():
            if time.monotonic() >= ends_at:
                return False
            if watches:
                self._poll()
            time.sleep(_TICK_S)
        return True

    def _poll(self) -> None:
        for role in self.roles.values():
            role.poll(time.monotonic())
        # A stopped store would block the harness, which must continue it.
        if time.monotonic() < self._next_read_at or self.roles["store"].is_stopped:
            return
        self._next_read_at = time.monotonic() + self.stage.pace.read_every_s
        try:
            progress = self._read_progress()
            if time.monotonic() >= self._next_audit_at:
                self._audit_state()
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
        self._check_pacing(counts.admitted)
        progress: dict[str, Progress] = {"store": (self._num_reads,), "broker": (arrived + counts.admitted,)}
        progress["learner"] = (self.store.run_state().step,)
        for name, role in self.roles.items():
            own = gauges.get(name, {})
            # The gauges of a predecessor stay in the store until the new process reports.
            if name not in progress and own.get("pid") == role.process.pid:
                progress[name] = (int(own.get("trajectories", 0) - own.get("outbox", 0)),)
        return progress

    def _check_pacing(self, admitted: int) -> None:
        """Record prompts admitted beyond the limit, except those admitted before a rollback."""
        # Read after `admitted` and never lowered, so that it can only overestimate.
        self._most_consumed = max(self._most_consumed, self.store.run_state().consumed)
        limit = self._most_consumed + self.stage.window
        if self._admitted is not None and admitted > max(limit, self._admitted):
            self.journal.write("overadmitted", admitted=admitted, limit=limit)
        self._admitted = max(admitted, self._admitted or 0)

    def _make_roles(self, num_generators: int) -> Iterator[Role]:
        stage = self.stage
        flags, note = stage.pace.flags, self._note
        yield Role("store", StoreProcess(stage.store), initial=(0,), note=note)
        if stage.pace.is_light:
            relay = [stage.relay_socket, stage.broker_socket, str(stage.seed)]
            yield Role("relay", self._process("relay", "tests.chaos.relay", relay))
        broker = self._process("broker", "tests.chaos.watched.broker", [*flags, *stage.settings])
        yield Role("broker", broker, note=note)
        learner = self._process("learner", "tests.chaos.scripted_learner", [*flags, *stage.settings])
        yield Role("learner", learner, may_finish=True, note=note)
        for number in range(num_generators):
            yield Role(f"generator-{number}", self._generator(number), initial=(0,), note=note)

    def _generator(self, number: int) -> Process:
        """The first generator is honest and has no relay; the last one lies."""
        name, pace = f"generator-{number}", self.stage.pace
        address = self.stage.relayed_address if pace.is_light and number else self.stage.address
        arguments = ["--id", name, f"name={NAME}", address]
        if pace.has_cold_generators:
            # vLLM reads its environment at import, so nothing may be patched earlier.
            return self._process(name, "slipstream.generators.__main__", arguments, is_cold=True)
        flags = [*pace.flags, *(["--misbehaves"] if number else []), *(["--lies"] if number == _LIAR else [])]
        return self._process(name, "tests.chaos.watched.generator", [*flags, *arguments])

    def _note(self, event: str, role: str) -> None:
        self.journal.write(event, role=role)
        self._next_audit_at = 0.0

    def _audit_state(self) -> None:
        self._next_audit_at = time.monotonic() + _AUDIT_EVERY_S
        state = self._read_state()
        self.state_problems |= dict.fromkeys(
            [*state_audit.find_state_problems(state), *state_audit.find_progress_problems(state)]
        )

    def _read_state(self) -> state_audit.Snapshot:
        snapshot: state_audit.Snapshot = self.store._call(state_audit.read_snapshot, self.store._client, f"{{{NAME}}}:")
        archive = self.stage.run_folder / "archive"
        # After the store: an entry leaves it only after the archive has it.
        return snapshot._replace(archived=Archive(archive).steps() if is_archive(archive) else [])

    def _process(self, name: str, module: str, arguments: list[str], *, is_cold: bool = False) -> Process:
        kind = ColdProcess if is_cold or self._is_cold else WarmProcess
        return kind(module, arguments, cwd=self.stage.folder, log=self.stage.logs / f"{name}.log")
