"""Launcher: starts, watches, restarts, scales, and stops the roles of a run."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from math import floor
from typing import Any

import msgspec
from rich.console import Console

from slipstream.broker.transport.endpoints import find_last_port
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import (
    ReplayBufferError,
    RunConflictError,
    StaleFenceError,
    StoreCannotWriteError,
    StoreUnavailableError,
)
from slipstream.buffer.object_folder import UPLOAD_TIMEOUT_S
from slipstream.buffer.redis.embedded import IDLE_TIMEOUT_S, EmbeddedRedis, RedisSupervisor
from slipstream.buffer.redis.run_store import open_run_store, store_url
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.role_reports import LAUNCHER, LEARNER, PROBLEM_PREFIX
from slipstream.buffer.store import StoreOutage
from slipstream.buffer.trajectory import Trajectory
from slipstream.cluster.observers import observed
from slipstream.cluster.role_process import RoleDiedError, RoleProcess
from slipstream.cluster.seat import LocalSeat, Places
from slipstream.configs.base import require
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.load import own_settings
from slipstream.configs.run import RunConfig
from slipstream.launch.generator_pool import (
    DEVICES_VARIABLE,
    Event,
    GeneratorPool,
    check_target,
    gpu_gib,
    place,
    visible_gpus,
)
from slipstream.launch.preflight import preparation_limit_s
from slipstream.launch.scaling import LauncherReport, Scaling
from slipstream.observe.finding import steps_shown
from slipstream.observe.run_status import Monitor, RunSnapshot
from slipstream.observe.terminal import LiveView, join_command
from slipstream.runtime.command_line import printable
from slipstream.runtime.credentials import TOKEN_VARIABLE, make_token
from slipstream.runtime.logs import make_output_lossy
from slipstream.runtime.process import LAUNCHER_VARIABLE, raise_on_stop_signal, run_in_thread
from slipstream.runtime.run_folder import RunFolder

_POLL_EVERY_S = 0.5
_ANSWER_TIMEOUT_S = 3.0
"""Longest wait for the store, during which no role is polled."""
_SAMPLED_GROUPS = 8
_REMIND_EVERY_S = 20.0
"""Interval between messages about a broker that still reads files."""
_MAX_PROBLEMS = 32
"""Largest number of kinds of problems to print, because untrusted generators could report any number."""
_STOP_TIMEOUT_S = 6.0
"""Time for all roles to end before they are killed."""
_ARCHIVE_TIMEOUT_S = 5.0
"""Minimum time for a broker to end, after all other roles."""
_SAVE_TIMEOUT_S = 120.0
"""Time for the learner to end its step and save a checkpoint before it is killed."""


class Launcher:
    """Runs the roles on this machine, or in `places`.

    Invariant: when `launch` returns or raises, every process it started has ended.
    """

    def __init__(
        self, run: RunConfig, folder: RunFolder, *, overrides: list[str], console: Console, places: Places | None = None
    ) -> None:
        self._run = run
        self._folder = folder
        self._opened_store: RedisStore | None = None
        self._view = LiveView(run, console=console, read_answers=self._read_answers)
        self._outage = StoreOutage(report=lambda sentence: self._view.print_line(sentence))
        self._supervisor: RedisSupervisor | None = None
        # Read once: later generators get GPUs from the same list.
        self._places = places
        self._visible_gpus = [] if places else visible_gpus()
        self._gpus = {LEARNER: places.gpus} if places else place(run, gpus=self._visible_gpus)
        self._set_roles(overrides)
        self._step: int | None = None
        self._remind_at = 0.0
        self._address = ""
        self._is_pool_started = False
        self._living_generators: set[str] = set()
        self._known_problems: set[str] = set()
        self._pool = GeneratorPool(self._generator, has_others=lambda: bool(self._living_generators - self._pool.names))

    def _set_roles(self, overrides: list[str]) -> None:
        self._overrides = overrides
        names = self._run.broker.names
        shards = [["--shard", str(number)] if len(names) > 1 else [] for number in range(len(names))]
        self._brokers = [
            self._role(name, ["slipstream.broker", *shard, *overrides], restart="always")
            for name, shard in zip(names, shards, strict=True)
        ]
        seat = partial(self._places.learner_seat, meet=self._meet_ranks) if self._places else LocalSeat
        # A restart resumes from the newest checkpoint.
        self._learner = self._role(
            "learner", ["slipstream.learner", *overrides], restart_arguments=["resume=true"], seat=seat
        )

    def _meet_ranks(self) -> dict[str, str]:
        address, port = find_last_port(self._run.cluster)
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    @property
    def _most_generators(self) -> int:
        scale = self._run.generators.autoscale
        return max(self._run.generators.count, scale.max if scale else 0)

    def _share_gpu(self) -> None:
        """Set the KV cache size if all roles share one GPU. Raises ConfigError if they do not fit.

        vLLM cannot measure the free memory, because the learner starts at the same time.
        """
        engine, gpus = self._run.generators.engine, self._gpus.get("learner", [])
        is_shared = len(self._visible_gpus) == 1 == len(gpus)
        if not is_shared or not isinstance(engine, VllmEngineConfig) or engine.kv_cache_gib is not None:
            return
        # Loads torch, which the launcher seldom needs.
        from slipstream.launch.plan import shared_cache_gib

        generators = msgspec.structs.replace(self._run.generators, count=self._most_generators)
        cache = shared_cache_gib(
            msgspec.structs.replace(self._run, generators=generators), gpu_gib=gpu_gib(self._visible_gpus[0])
        )
        self._set_roles([*self._overrides, f"generators.engine.kv_cache_gib={floor(100 * cache) / 100:g}"])

    def _generator(self, name: str) -> RoleProcess:
        if self._places:
            # Its machine lacks the run folder, which has address and token.
            where = (f"name={self._run.name}", f"broker.address={self._address}")
            limit = f"broker.join_timeout_s={self._run.broker.join_timeout_s}"
            arguments = ["slipstream.generators", "--id", name, *own_settings(self._overrides), *where, limit]
            num_threads = str(max(1, floor(self._run.cluster.generator.cpus)))
            variables = {TOKEN_VARIABLE: make_token(self._run), "OMP_NUM_THREADS": num_threads}
            seat = partial(self._places.seat, name)
            return RoleProcess(name, arguments, logs=self._folder.logs, seat=seat, variables=variables)
        # The run folder has address and token; the broker sends the other settings.
        where = (f"name={self._run.name}", f"runs_dir={json.dumps(self._run.runs_dir)}")
        # The broker listens once inputs are prepared.
        limit_s = self._run.broker.join_timeout_s + preparation_limit_s(self._run)
        return self._role(name, ["slipstream.generators", "--id", name, *where, f"broker.join_timeout_s={limit_s}"])

    def _check_room(self, count: int) -> None:
        """Assign GPUs to `count` generators. Raises ConfigError if they do not fit."""
        if self._places:
            return
        check_target(self._run, count, num_cores=os.cpu_count() or 1)
        is_fit = len(self._visible_gpus) != 1 or count <= self._most_generators
        must = f"be <= {self._most_generators} on the one GPU of this machine"
        why = "its memory is divided at the start; start the run with that generators.count"
        require(is_fit, "generators", must, got=count, why=why)
        # At least as many as at the start, so that running generators keep their GPUs.
        generators = msgspec.structs.replace(self._run.generators, count=max(count, self._run.generators.count))
        self._gpus |= place(msgspec.structs.replace(self._run, generators=generators), gpus=self._visible_gpus)

    def _role(self, name: str, arguments: list[str], **options: Any) -> RoleProcess:
        """`options`: as for RoleProcess."""
        gpus = {DEVICES_VARIABLE: ",".join(self._gpus[name])} if name in self._gpus else {}
        return RoleProcess(name, arguments, logs=self._folder.logs, variables=gpus, **options)

    def launch(self, *, prepare: Callable[[], None] | None = None) -> None:
        """Run all roles until the learner finishes.

        `prepare` makes missing inputs while generators load libraries.
        """
        make_output_lossy()
        raise_on_stop_signal()
        make_token(self._run)
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        try:
            # In this order, the store outlives roles, and observers get the last rows.
            logs = self._folder.logs
            with (
                self._store() as store,
                observed(self._run, logs=logs) as self._observers,
                self._processes(prepare),
                self._view.shown(),
            ):
                self._watch_and_report(store)
        finally:
            if self._brokers[0].pid is None:
                # Preparation failed: free the name again.
                self._folder.discard()

    @contextmanager
    def _store(self) -> Iterator[RedisStore]:
        config = self._run.buffer.store
        if not isinstance(config, EmbeddedRedisConfig):
            with self._open(store_url(self._run, self._folder.path)) as store:
                yield store
            return
        server = EmbeddedRedis(
            self._folder.store,
            durability=config.durability,
            max_memory_mib=config.max_memory_mib,
            # No role connects during preparation.
            idle_timeout_s=IDLE_TIMEOUT_S + preparation_limit_s(self._run),
        )
        self._supervisor = RedisSupervisor(server, start_timeout_s=self._run.broker.store_timeout_s)
        try:
            self._supervisor.start()
            with self._open(server.url) as store:
                yield store
        finally:
            self._supervisor.stop()

    def _open(self, url: str) -> RedisStore:
        # No retries, because the roles must be polled during an outage.
        return open_run_store(
            url, self._run.name, timeout_s=self._run.broker.store_timeout_s, answer_timeout_s=_ANSWER_TIMEOUT_S
        )

    @contextmanager
    def _processes(self, prepare: Callable[[], None] | None) -> Iterator[None]:
        try:
            # Generators first: their libraries load slowest. On other machines they need the broker's address.
            if not self._places:
                self._start_pool()
            if prepare:
                prepare()
            # Needs the prepared model. The broker sends the result to the generators.
            self._share_gpu()
            for role in (*self._brokers, self._learner):
                role.start()
            self._folder.record_stage(LAUNCHER, "roles started")
            yield
        finally:
            try:
                self._end_roles(ends_at=time.monotonic() + _STOP_TIMEOUT_S)
                self._folder.record_stage(LAUNCHER, "roles ended")
            except KeyboardInterrupt:
                # Second Ctrl-C: no role may survive into the next run.
                for role in self._roles:
                    role.stop(ends_at=0.0)
                raise

    def _end_roles(self, *, ends_at: float) -> None:
        # Brokers end last, because the other roles sign off with them.
        for role in reversed(self._roles[len(self._brokers) :]):
            role.terminate()
        while self._opened_store and self._learner.is_running and time.monotonic() < ends_at:
            has_stepped = False
            # The last poll may be older than the first step.
            with suppress(ReplayBufferError):
                has_stepped = bool(self._step or self._opened_store.run_state().step)
            if has_stepped:
                self._save_progress()
                ends_at = time.monotonic() + _STOP_TIMEOUT_S
                break
            time.sleep(_POLL_EVERY_S)
        for role in reversed(self._roles):
            role.terminate()
            is_broker = role in self._brokers
            # It archives the last groups, however long the others took.
            least_s = _ARCHIVE_TIMEOUT_S + (UPLOAD_TIMEOUT_S if self._run.storage.uri else 0.0) if is_broker else 0.0
            role.stop(ends_at=max(ends_at, time.monotonic() + least_s))

    def _save_progress(self) -> None:
        self._view.print_line("stopping: the learner ends its step and saves a checkpoint; Ctrl-C again kills it")
        upload_s = UPLOAD_TIMEOUT_S if self._run.storage.uri else 0.0
        self._learner.stop(ends_at=time.monotonic() + _SAVE_TIMEOUT_S + upload_s)
        if self._learner.has_finished:
            return
        names = [path.name for path in self._folder.checkpoints.glob("step-*")]
        if steps := [int(name.removeprefix("step-").partition(".")[0]) for name in names]:
            command = f"slipstream run name={self._run.name} resume=true"
            self._view.print_line(f"stopped; the newest checkpoint is that of step {max(steps)}; continue: {command}")

    def _start_pool(self) -> list[Event]:
        self._is_pool_started = True
        return self._pool.set_target(self._run.generators.count)

    @property
    def _roles(self) -> list[RoleProcess]:
        return [*self._brokers, self._learner, *self._pool.roles]

    def _watch_and_report(self, store: RedisStore) -> None:
        report = LauncherReport(store)
        reason = "stopped"
        try:
            self._watch(store, report)
            reason = "the learner has finished"
        except RoleDiedError as death:
            reason = str(death).splitlines()[0]
            report.record(Event(LAUNCHER, f"ends the run: {death}"))
            raise
        finally:
            self._folder.record_stage(LAUNCHER, "learner ended")
            report.end(reason=reason, restarts=self._restarts(), generators_target=self._pool.target)

    def _read_answers(self, step: int) -> list[Trajectory]:
        """Trajectories of some groups of a step that are still in the store."""
        store = self._opened_store
        entries = store.ledger(first_step=step)[:1] if store else []
        if store is None or not entries or entries[0].step != step:
            return []
        try:
            groups = store.fetch(entries[0].group_ids[:_SAMPLED_GROUPS])
        except StaleFenceError:
            return []
        return [unpack(payload) for group in groups for payload in group]

    def _watch(self, store: RedisStore, report: LauncherReport) -> None:
        self._opened_store = store
        monitor = Monitor(store, self._run)
        scaling = Scaling(self._pool, report, run=self._run, check_room=self._check_room)
        self._remind_at = time.monotonic() + _REMIND_EVERY_S
        while not self._learner.has_finished:
            self._update(store, monitor, scaling, report)
            # A store outage is reported before the deaths that it causes.
            events = [Event("store", message) for message in (self._supervisor.poll() if self._supervisor else [])]
            events += [Event(role.name, words) for role in (*self._brokers, self._learner) for words in role.poll()]
            events += [Event("observers", message) for message in self._observers.poll()]
            self._publish(events + self._pool.poll(), report)
            time.sleep(_POLL_EVERY_S)
        self._update(store, monitor, scaling, report)
        # Import matplotlib while the roles end: both take about a second.
        run_in_thread(partial(import_module, "slipstream.observe.plot"), name="load")

    def _publish(self, events: list[Event], report: LauncherReport) -> None:
        for event in events:
            self._view.print_line(event.message)
            report.record(event)

    def _restarts(self) -> dict[str, int]:
        return {role.name: role.num_restarts for role in self._roles}

    def _record_work(self, snapshot: RunSnapshot) -> None:
        state = snapshot.state
        if self._step is None and self._run.resume and state.step:
            covered = state.checkpoint.step if state.checkpoint else 0
            again = f"; the learner repeats {steps_shown(covered + 1, state.step)}" if covered < state.step else ""
            kept = f"; {self._folder.metrics} has {steps_shown(1, covered)}" if covered else ""
            self._view.print_line(f"resuming after step {covered}, the newest checkpoint{again}{kept}")
        # A rollback lowers the step, so only a rising step shows that the learner works.
        if self._step is not None and snapshot.state.step > self._step:
            self._learner.record_work()
        self._step = snapshot.state.step
        # A broker is ready once it serves, a generator once its weights are verified.
        ready = {gauges.get("pid") for gauges in snapshot.roles.values() if gauges.get("state") == "ready"}
        for role in (*self._brokers, *self._pool.roles):
            if role.pid in ready:
                role.record_work()
        reports = [(role, snapshot.roles.get(role.name, {})) for role in self._brokers]
        # The store may still hold a report of an earlier process.
        addresses = [str(report.get("address", "")) for role, report in reports if role.pid == report.get("pid")]
        if addresses and self._address not in addresses:
            self._address = addresses[0]
            self._view.print_line(f"generators on other machines join with {join_command(self._address)}")

    def _new_problems(self, snapshot: RunSnapshot) -> Iterator[Event]:
        """Yield problems of new kinds."""
        for name in sorted(snapshot.living_generators):
            for kind, problem in snapshot.roles[name].items():
                is_new = kind.startswith(PROBLEM_PREFIX) and kind not in self._known_problems
                if is_new and len(self._known_problems) < _MAX_PROBLEMS:
                    self._known_problems.add(kind)
                    yield Event(name, printable(f"{name} reports: {problem}"))

    def _update(self, store: RedisStore, monitor: Monitor, scaling: Scaling, report: LauncherReport) -> None:
        """Show, report, and scale. Raises StoreUnavailableError after too long an outage."""
        try:
            snapshot = monitor.poll()
            if self._step is None and self._run.resume:
                # A resumed run's terminal has shown these rows before.
                snapshot = msgspec.structs.replace(snapshot, new_rows=[])
            self._living_generators = snapshot.living_generators
            self._record_work(snapshot)
            if self._address and not self._is_pool_started:
                self._publish(self._start_pool(), report)
            self._view.show(snapshot)
            self._publish([*self._new_problems(snapshot), *scaling.poll(store, snapshot)], report)
            report.send(restarts=self._restarts(), generators_target=self._pool.target)
            self._outage.end()
        except StoreUnavailableError as error:
            self._outage.record(error)
            # A store that only refuses writes waits for disk space without limit.
            is_away = not isinstance(error, StoreCannotWriteError)
            if is_away and self._outage.seconds > self._run.broker.store_timeout_s:
                raise
        except RunConflictError:
            # The broker has not opened the run yet or, after a step, the store was emptied.
            if self._step is not None:
                raise
            if time.monotonic() > self._remind_at:
                self._remind_at = time.monotonic() + _REMIND_EVERY_S
                log = self._folder.logs / f"{self._brokers[0].name}.log"
                self._view.print_line(f"waiting for the broker to open the run: {self._brokers[0].place}, log {log}")
