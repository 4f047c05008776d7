"""Launcher: the roles of a run as processes of this machine, started, watched, scaled and stopped."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console

from slipstream.broker.status.live_view import LiveView
from slipstream.broker.status.monitor import Monitor
from slipstream.broker.store_outage import StoreOutage
from slipstream.buffer.errors import ReplayBufferError, StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.redis.supervisor import RedisSupervisor
from slipstream.configs.buffer import EmbeddedRedisConfig, RedisConfig
from slipstream.configs.run import RunConfig
from slipstream.launch.generator_pool import (
    DEVICES_VARIABLE,
    GeneratorPool,
    Happening,
    check_number,
    place,
    visible_gpus,
)
from slipstream.launch.scaling import LauncherReport, Scaling
from slipstream.runtime.process import LAUNCHER_VARIABLE, Restart, RoleDiedError, RoleProcess, raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder

_LOOK_EVERY_S = 0.5
_ANSWER_TIMEOUT_S = 3.0
"""For one answer of the store: while the launcher waits for it, no role is looked after."""
_STOP_TIMEOUT_S = 6.0


class Launcher:
    """Runs the roles as processes of this machine.

    Invariant: when `launch` returns or raises, none of the processes it started is left.
    """

    def __init__(self, run: RunConfig, folder: RunFolder, *, overrides: list[str], console: Console) -> None:
        self._run = run
        self._folder = folder
        self._view = LiveView(run, console=console)
        self._outage = StoreOutage(report=lambda sentence: self._view.print_line(sentence))
        self._keeper: RedisSupervisor | None = None
        self._visible_gpus = visible_gpus()
        self._gpus = place(run, gpus=self._visible_gpus)
        self._broker = self._role("broker", ["slipstream.broker", *overrides], restart="kept")
        # An error of the learner's own would come again; a killed one goes on from its newest checkpoint.
        self._learner = self._role(
            "learner", ["slipstream.learner", *overrides], restart="killed", restart_arguments=["resume=true"]
        )
        self._living: set[str] = set()
        self._fleet = GeneratorPool(self._generator, lives_another=lambda: bool(self._living - self._fleet.names))

    def _generator(self, name: str) -> RoleProcess:
        arguments = ["slipstream.generators", "--id", name, f"broker.address={self._run.broker.address}"]
        if token_file := self._run.broker.token_file:
            arguments.append(f"broker.token_file={json.dumps(token_file)}")
        return self._role(name, arguments)

    def _check_room(self, count: int) -> None:
        """Find the GPUs for so many generators; a generator's stay the same. Raises ConfigError."""
        check_number(self._run, wanted=count, num_cores=os.cpu_count() or 1)
        generators = msgspec.structs.replace(self._run.generators, count=max(count, self._run.generators.count))
        self._gpus |= place(msgspec.structs.replace(self._run, generators=generators), gpus=self._visible_gpus)

    def _role(
        self, name: str, arguments: list[str], *, restart: Restart = "always", restart_arguments: Sequence[str] = ()
    ) -> RoleProcess:
        gpus = {DEVICES_VARIABLE: ",".join(self._gpus[name])} if name in self._gpus else {}
        return RoleProcess(
            name,
            arguments,
            logs=self._folder.logs,
            restart=restart,
            restart_arguments=restart_arguments,
            variables=gpus,
        )

    def launch(self) -> None:
        """Start everything, watch until the learner has finished, stop everything."""
        raise_on_stop_signal()
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        with self._store() as store, self._processes(), self._view.shown():
            self._watch_and_report(store)

    @contextmanager
    def _store(self) -> Iterator[RedisStore]:
        config = self._run.buffer.store
        if not isinstance(config, EmbeddedRedisConfig):
            assert isinstance(config, RedisConfig)
            with self._opened(config.url) as store:
                yield store
            return
        server = EmbeddedRedis(self._folder.store, durability=config.durability, max_memory_mib=config.max_memory_mib)
        self._keeper = RedisSupervisor(server, start_timeout_s=self._run.buffer.retry_timeout_s)
        try:
            self._keeper.start()
            with self._opened(server.url) as store:
                yield store
        finally:
            self._keeper.stop()

    @contextmanager
    def _opened(self, url: str) -> Iterator[RedisStore]:
        """Without patience: the roles must be looked after while the store is away."""
        store = open_run_store(
            url,
            self._run.name,
            timeout_s=self._run.buffer.retry_timeout_s,
            max_attempts=self._run.buffer.max_attempts,
            answer_timeout_s=_ANSWER_TIMEOUT_S,
        )
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def _processes(self) -> Iterator[None]:
        """The broker goes last: the others say goodbye to it."""
        try:
            self._broker.start()
            self._learner.start()
            self._fleet.set_wanted(self._run.generators.count)
            yield
        finally:
            ends_at = time.monotonic() + _STOP_TIMEOUT_S
            for role in reversed(self._roles[1:]):
                role.terminate()
            for role in reversed(self._roles):
                role.terminate()
                role.stop(ends_at=ends_at)

    @property
    def _roles(self) -> list[RoleProcess]:
        return [self._broker, self._learner, *self._fleet.roles]

    def _watch_and_report(self, store: RedisStore) -> None:
        report = LauncherReport(store)
        reason = "stopped"
        try:
            self._watch(store, report)
            reason = "the learner has finished"
        except RoleDiedError as death:
            reason = str(death).splitlines()[0]
            report.note("launcher", f"gives up: {death}")
            raise
        finally:
            report.end(reason=reason, restarts=self._restarts(), generators_target=self._fleet.wanted)

    def _watch(self, store: RedisStore, report: LauncherReport) -> None:
        monitor = Monitor(store, self._run)
        scaling = Scaling(self._fleet, report, run=self._run, check_room=self._check_room)
        while not self._learner.has_finished:
            self._look(store, monitor, scaling, report)
            self._tell(self._attend_all(), report)
            time.sleep(_LOOK_EVERY_S)
        self._look(store, monitor, scaling, report)

    def _tell(self, happened: list[Happening], report: LauncherReport) -> None:
        for name, sentence in happened:
            self._view.print_line(sentence)
            report.note(name, sentence)

    def _attend_all(self) -> list[Happening]:
        """What happened, by role."""
        kept = self._keeper.poll() if self._keeper else []
        happened = [("store", sentence) for sentence in kept]
        happened += [(role.name, sentence) for role in (self._broker, self._learner) for sentence in role.poll()]
        return happened + self._fleet.poll()

    def _restarts(self) -> dict[str, int]:
        return {role.name: role.num_restarts for role in self._roles}

    def _look(self, store: RedisStore, monitor: Monitor, scaling: Scaling, report: LauncherReport) -> None:
        """Show the run; while its store is away, for how long. Raises StoreUnavailableError when that lasts too long."""
        try:
            snapshot = monitor.poll()
            self._living = snapshot.living_generators
            self._view.show(snapshot)
            self._tell(scaling.look(store, snapshot), report)
            report.send(restarts=self._restarts(), generators_target=self._fleet.wanted)
            self._outage.end()
        except StoreUnavailableError as fault:
            self._outage.record(fault)
            if self._outage.seconds > self._run.buffer.retry_timeout_s:
                raise
        except ReplayBufferError:
            # The broker has not opened the run yet.
            return
