"""Harness: starts the roles, hits them, starts them again, and lets the run come to its end."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from slipstream.buffer.errors import ReplayBufferError
from tests.chaos import lineage
from tests.chaos.books import Books, read_archive
from tests.chaos.cold_process import ColdProcess
from tests.chaos.role import Process, Role
from tests.chaos.stage import NAME, Stage
from tests.chaos.store_process import StoreProcess
from tests.chaos.strikes import Strike
from tests.chaos.warm_process import WarmProcess
from tests.chaos.watch import Watch

_TICK_S = 0.02
_LOOK_EVERY_S = 0.04
_BACK_S = 60.0
"""For a role that is gone to be there again."""


class Harness:
    """Life: start -> torment -> settle -> end. Owns every process it starts, and ends it."""

    def __init__(self, stage: Stage, *, num_generators: int, is_cold: bool) -> None:
        """`is_cold`: start every role with a fresh interpreter."""
        self._stage = stage
        self._is_cold = is_cold
        self.roles = {role.name: role for role in self._cast(num_generators)}
        """By name; the store is the first."""
        self._watch: Watch | None = None
        self._next_look_at = 0.0
        self.newest_step = 0
        """As last seen."""

    @property
    def generators(self) -> list[str]:
        """Names of the generators."""
        return [name for name in self.roles if name.startswith("generator")]

    @property
    def num_recoveries(self) -> int:
        """Of all roles."""
        return sum(len(role.recovery.seconds) for role in self.roles.values())

    @property
    def crashes(self) -> list[str]:
        """A sentence for each bug that ended a role."""
        return [sentence for role in self.roles.values() for sentence in role.crashes]

    @property
    def watch(self) -> Watch:
        """What it sees of the run."""
        assert self._watch is not None, "start() comes first"
        return self._watch

    def start(self, *, timeout_s: float) -> None:
        """Start everybody, the store first; block until the first step is done. Raises TimeoutError."""
        self._stage.hold_file.touch()
        for role in self.roles.values():
            role.start(time.monotonic())
        self._watch = Watch(self._stage.store.url, NAME)
        if not self._attend_until(lambda: self.newest_step > 0, timeout_s=timeout_s):
            raise TimeoutError(f"the first step must be done within {timeout_s:g} s, {self._last_words()}")

    def torment(self, strikes: Iterator[Strike], *, minutes: float) -> Iterator[Strike]:
        """Deliver the strikes until they are used up or the time is; yields each delivered one."""
        ends_at = time.monotonic() + 60 * minutes
        for strike in strikes:
            if strike.is_sparing:
                self._attend_until(self._is_spared, timeout_s=self._stage.pace.spare_at_most_s)
            self._attend_for(strike.gap_s)
            role = self.roles[strike.role]
            self._attend_until(lambda role=role: role.is_alive, timeout_s=_BACK_S)
            if time.monotonic() >= ends_at:
                return
            role.strike(strike, time.monotonic())
            yield strike

    def settle(self, *, timeout_s: float) -> None:
        """Let the run come to its end, undisturbed. Raises TimeoutError, naming what everybody said last."""
        self._stage.hold_file.unlink(missing_ok=True)
        learner = self.roles["learner"]
        if not self._attend_until(lambda: learner.has_finished and self._is_archived, timeout_s=timeout_s):
            raise TimeoutError(f"the run must end {timeout_s:g} s after the last strike, {self._last_words()}")

    def books(self) -> Books:
        """Of the run as it stands; its store must answer."""
        store = self.watch.store
        newest = store.run_state().checkpoint
        trained = lineage.read(self._stage.run_folder / "checkpoints" / newest.name) if newest else []
        archived, check = read_archive(self._stage.run_folder / "archive")
        return Books(store.audit(), store.counts(), store.ledger(), trained, archived, check)

    def end(self) -> None:
        """Kill whoever is left, the store last."""
        for role in reversed(self.roles.values()):
            role.end()

    def clear(self) -> None:
        """Remove the folder."""
        with suppress(OSError):
            shutil.rmtree(self._stage.folder)

    def _is_spared(self) -> bool:
        """Whether all work, or the run waits before its last step: nobody has work left to be seen at."""
        all_work = not any(role.recovery.is_down for role in self.roles.values())
        return all_work or self.newest_step >= self._stage.steps - 1

    @property
    def _is_archived(self) -> bool:
        try:
            return self.watch.store.counts().unarchived == 0
        except ReplayBufferError:
            return False

    def _last_words(self) -> str:
        return "last said: " + "; ".join(f"{role.name}: {role.process.last_line}" for role in self.roles.values())

    def _attend_for(self, seconds: float) -> None:
        self._attend_until(lambda: False, timeout_s=seconds)

    def _attend_until(self, is_so: Callable[[], bool], *, timeout_s: float) -> bool:
        """Look after everybody until `is_so`, at most `timeout_s`; returns whether it is."""
        ends_at = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() >= ends_at:
                return False
            self._attend()
            time.sleep(_TICK_S)
        return True

    def _attend(self) -> None:
        for role in self.roles.values():
            role.poll(time.monotonic())
        if time.monotonic() < self._next_look_at or self.roles["store"].is_stopped:
            return
        self._next_look_at = time.monotonic() + _LOOK_EVERY_S
        seen = self.watch.look({name: role.process.pid for name, role in self.roles.items()})
        if step := seen.get("learner"):
            self.newest_step = step[0]
        for name, role in self.roles.items():
            role.look(seen.get(name), time.monotonic())

    def _cast(self, num_generators: int) -> Iterator[Role]:
        stage = self._stage
        yield Role("store", StoreProcess(stage.store), newborn=(0,))
        yield Role("broker", self._process("broker", "slipstream.broker.__main__", stage.settings))
        learner = self._process("learner", "tests.chaos.scripted_learner", stage.settings)
        yield Role("learner", learner, may_finish=True)
        for number in range(num_generators):
            name = f"generator-{number}"
            arguments = ["--id", name, stage.address]
            generator = self._process(
                name, "slipstream.generators.__main__", arguments, is_cold=stage.pace.has_cold_generators
            )
            yield Role(name, generator, newborn=(0,))

    def _process(self, name: str, module: str, arguments: list[str], *, is_cold: bool = False) -> Process:
        kind = ColdProcess if is_cold or self._is_cold else WarmProcess
        return kind(module, arguments, cwd=self._stage.folder, log=self._stage.logs / f"{name}.log")
