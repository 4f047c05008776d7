"""Acts of a light run: targeted strikes at points where data can be lost, mixed with random strikes.

A random strike rarely falls between two writes that are a millisecond apart. An act makes the role stop or kill itself
there, or combines two failures. Every seed plays all acts, with its own order and times.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import psutil

from slipstream.buffer.redis.connection import connect
from tests.chaos.role import Action, Strike
from tests.chaos.watched.journal import ask, read_journals

_OBEY_TIMEOUT_S = 20.0
"""Longest wait for a role to reach a point, possibly after a restart."""
_SUCCESSOR_TIMEOUT_S = 12.0
_ZOMBIE_S = 1.5
_FULL_S = 3.8
_NEWS_S = 0.5
_CALM_S = 1.0
"""Time for prompts to be leased again after a strike."""
_QUIET_S = 5.0
_LATER_S = 3600.0


class Act(NamedTuple):
    name: str
    num_kills: int
    play: Callable[[], None]


class Acts:
    def __init__(self, harness: Any, *, seed: int) -> None:
        self._harness = harness
        self._random = random.Random(seed)
        self.missed: list[str] = []
        """Points that no role reached in time."""

    def schedule(self, kills: int) -> Iterator[Act]:
        """Yield the acts in the order of the seed, random strikes in between, and a quiet end; about `kills` in all.

        Twenty kills suffice for every act; with fewer, some acts are skipped.
        """
        acts = [
            Act("zombie at a commit", 1, lambda: self._zombie("after_commit")),
            Act("zombie at a checkpoint", 1, lambda: self._zombie("before_pointer", is_overtaken=True)),
            Act("claim lapses in a step", 0, self._lapse),
            Act("death before a checkpoint is sealed", 1, lambda: self.die("learner", "before_seal")),
            Act("death before a checkpoint has its name", 1, lambda: self.die("learner", "before_merge")),
            Act("death before groups retire", 1, lambda: self.die("learner", "before_retire")),
            Act("death before groups are forgotten", 1, lambda: self.die("broker", "before_forget")),
            Act("death before a shard", 1, lambda: self.die("broker", "before_shard")),
            Act("full store", 0, self._fill_store),
            Act("store away, two generators die", 3, self._lose_two_while_the_store_is_away),
            Act("store away, a generator returns", 1, self._return_while_the_store_is_away),
            Act("generator and broker die", 2, self._lose_broker_and_generator),
            Act("generator dies amid calm", 1, self._lose_generator),
            Act("generator is late", 0, lambda: self._stop("generator-0", 1.2)),
            Act("generator is drained", 1, self._drain),
            Act("clock is set back", 0, self._set_clock_back),
        ]
        self._random.shuffle(acts)
        while sum(act.num_kills for act in acts) > kills:
            acts.pop()
        num_random = max(0, kills - sum(act.num_kills for act in acts))
        for number, act in enumerate(acts):
            share = num_random * (number + 1) // len(acts) - num_random * number // len(acts)
            for _ in range(share):
                yield Act("strike", 1, self._strike_at_random)
            yield act
        yield Act("store away at the end", 1, lambda: self._kill("store", down_s=1.0))
        yield Act("quiet", 0, lambda: self._wait(_QUIET_S))

    def _strike_at_random(self) -> None:
        (name,) = self._random.choices(["store", "broker", "learner", "generator"], [2, 3, 2, 4])
        name = f"generator-{self._random.randrange(3)}" if name == "generator" else name
        self._wait(self._random.uniform(0, 0.5))
        self._kill(name, down_s=self._random.choice([0.0, 0.0, 0.8]))

    def _zombie(self, point: str, *, is_overtaken: bool = False) -> None:
        """Stop the learner at a point until another one takes over, then continue it.

        `is_overtaken`: continue only after the other has committed the same step. Earlier, the store could reject the
        zombie's checkpoint as ahead, without checking fences.
        """
        learner = self._harness.roles["learner"]
        if not self._stops_at(point):
            return
        pid = learner.process.pid
        learner.strikes["stop"] += 1
        step = self._harness.store.run_state().step
        zombie, replaced_at = learner.replace(time.monotonic()), time.time()
        self._harness.poll_until(lambda: self._has_successor(replaced_at), timeout_s=_SUCCESSOR_TIMEOUT_S)
        if is_overtaken:
            is_past = lambda: self._harness.store.run_state().step >= step  # noqa: E731
            self._harness.poll_until(is_past, timeout_s=_SUCCESSOR_TIMEOUT_S)
        os.kill(pid, signal.SIGCONT)
        self._harness.poll_until(lambda: zombie.exit_code is not None, timeout_s=_ZOMBIE_S)
        if zombie.exit_code is None:
            os.kill(pid, signal.SIGKILL)
        learner.strikes["kill"] += 1

    def _lapse(self) -> None:
        """Stop the learner in a step until its claim lapses, then continue it."""
        learner = self._harness.roles["learner"]
        if self._stops_at("in_step"):
            pid = learner.process.pid
            learner.strikes["stop"] += 1
            self._harness.journal.write("stop", role="learner")
            self._wait(self._harness.stage.pace.lapse_after_s + 1.5)
            self._harness.journal.write("continue", role="learner")
            os.kill(pid, signal.SIGCONT)

    def die(self, role: str, point: str) -> None:
        path = ask(self._harness.stage.points, role, point, "kill")
        # The role removes the request before it dies.
        if self._harness.poll_until(lambda: not path.exists(), timeout_s=_OBEY_TIMEOUT_S):
            self._harness.roles[role].expect_death(time.monotonic())
            self._harness.roles[role].process.wait(timeout_s=1.0)
            self._harness.check_archive()
        else:
            self.missed.append(point)
        path.unlink(missing_ok=True)

    def _fill_store(self) -> None:
        self._harness.journal.write("full")
        self._set_max_memory("1mb")
        self._wait(_FULL_S)
        self._set_max_memory("0")
        self._harness.journal.write("room")

    def _lose_two_while_the_store_is_away(self) -> None:
        self._await_work("generator-0", "generator-1")
        self._kill("store", down_s=2.0)
        self._kill("generator-0")
        self._kill("generator-1")
        self._wait(2.0 + self._harness.stage.pace.lapse_after_s + 1.0)

    def _return_while_the_store_is_away(self) -> None:
        """A generator times out during a store outage, which cannot be recorded, and returns before the store."""
        self._stop("generator-0", 2.2)
        self._wait(0.5)
        self._kill("store", down_s=2.6)
        self._wait(3.0)

    def _lose_broker_and_generator(self) -> None:
        victim = f"generator-{self._random.randrange(2)}"
        self._await_work(victim)
        self._kill("broker")
        self._kill(victim)
        self._wait(1.0)

    def _lose_generator(self) -> None:
        """A generator dies with leases, and the same broker welcomes its successor."""
        self._wait(_CALM_S)
        self._await_work("generator-1")
        self._kill("generator-1")
        self._wait(self._harness.stage.pace.lapse_after_s + 1.0)

    def _drain(self) -> None:
        self._await_work("generator-1")
        self._send("generator-1", "terminate")
        self._wait(0.5)

    def _set_clock_back(self) -> None:
        folders = sorted((self._harness.stage.run_folder / "checkpoints").glob("step-*"))
        if folders:
            later = time.time() + _LATER_S
            os.utime(folders[0], (later, later))

    def _wait(self, seconds: float) -> None:
        self._harness.poll_until(lambda: False, timeout_s=seconds)

    def _await_work(self, *generators: str) -> None:
        """Wait until they hold prompts, because an idle generator loses nothing."""
        are_busy = lambda: all(self._holds_leases(name) for name in generators)  # noqa: E731
        if not self._harness.poll_until(are_busy, timeout_s=_OBEY_TIMEOUT_S):
            self.missed.append("prompts")

    def _holds_leases(self, generator: str) -> bool:
        lives = read_journals(self._harness.stage.journals, role=generator)
        pongs = [pong for pong in lives[-1].of("pong") if pong["t"] > time.time() - _NEWS_S] if lives else []
        return bool(pongs) and bool(pongs[-1]["leases"])

    def _kill(self, role: str, *, down_s: float = 0.0) -> None:
        self._send(role, "kill", down_s=down_s)
        if role == "broker":
            self._harness.roles[role].process.wait(timeout_s=1.0)
            self._harness.check_archive()

    def _stop(self, role: str, seconds: float) -> None:
        self._send(role, "stop", stopped_s=seconds)

    def _send(self, role: str, action: Action, *, stopped_s: float = 0.0, down_s: float = 0.0) -> None:
        strike = Strike(role, action, False, 0.0, stopped_s, down_s)
        self._harness.poll_until(lambda: self._harness.roles[role].is_alive, timeout_s=_SUCCESSOR_TIMEOUT_S)
        self._harness.roles[role].strike(strike, time.monotonic())

    def _stops_at(self, point: str) -> bool:
        """Make the learner stop itself at a point; return whether it did."""
        path = ask(self._harness.stage.points, "learner", point, "stop")
        stands = self._harness.poll_until(lambda: not path.exists() and self._is_stopped(), timeout_s=_OBEY_TIMEOUT_S)
        path.unlink(missing_ok=True)
        self.missed += [] if stands else [point]
        return stands

    def _is_stopped(self) -> bool:
        pid = self._harness.roles["learner"].process.pid
        return psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED

    def _has_successor(self, began_at: float) -> bool:
        lives = read_journals(self._harness.stage.journals, role="learner", since=began_at)
        return any(life.of("rolled_back") for life in lives)

    def _set_max_memory(self, size: str) -> None:
        with closing(connect(self._harness.stage.store.url)) as client:
            client.config_set("maxmemory", size)
