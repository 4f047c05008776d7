"""Draining: one generator of a run is told to hand back what it holds and to leave.

The command leaves a request in the run's store; the broker passes it on, to a generator on whatever machine.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from broker.peers import Peer
from broker.run_store import find_run, open_store_of
from buffer.errors import BufferFault
from buffer.store import Store
from configs.base import ConfigError
from configs.exits import NO_ANSWER, give_up

DRAIN = "drain/"
"""How the subject of a request begins; the generator's id follows. Its value: until when it counts (store clock)."""
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.2


def drain(arguments: list[str]) -> None:
    """`ID [name=RUN] [runs_dir=FOLDER]`. Raises ConfigError; exits with NO_ANSWER when it does not leave in time."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError(f"drain needs the id of a generator first, got {' '.join(arguments) or 'nothing'}.")
    generator_id = arguments[0]
    folder = find_run(arguments[1:], command="drain")
    try:
        with open_store_of(folder) as (store, _):
            _check_is_here(store, generator_id, run=folder.name)
            store.request("broker", DRAIN + generator_id, str(store.now() + _PATIENCE_S))
            print(f"{generator_id} of {folder.name} is told to leave")
            _wait_until_gone(store, generator_id)
    except BufferFault as fault:
        give_up(fault, code=NO_ANSWER)
    print(f"{generator_id} has left")


class Drains:
    """Whom the broker was asked to drain, until they have gone: one may come only later, and a word may get lost."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}

    def take(self, requests: dict[str, str], *, now: float) -> None:
        """Requests as they were left in the store; what nobody waits for any more is forgotten."""
        for subject, ends_at in requests.items():
            if subject.startswith(DRAIN):
                self._asked[subject.removeprefix(DRAIN)] = _Asked(float(ends_at))
        self._asked = {name: asked for name, asked in self._asked.items() if now < asked.ends_at}

    @property
    def are_none(self) -> bool:
        """Whether nobody is to be told."""
        return not self._asked

    def due(self, generators: Iterable[Peer]) -> list[Peer]:
        """Those that are to be told now, once more if need be; never another one that came under the same name."""
        return [peer for peer in generators if peer.state != "draining" and self._means(peer)]

    def note_told(self, peer: Peer) -> bool:
        """It was told. Returns whether for the first time."""
        asked = self._asked[peer.hello.peer_id]
        is_first, asked.owner = not asked.owner, peer.owner
        return is_first

    def _means(self, peer: Peer) -> bool:
        asked = self._asked.get(peer.hello.peer_id)
        return asked is not None and asked.owner in ("", peer.owner)


@dataclass
class _Asked:
    ends_at: float
    """Store's clock."""
    owner: str = ""
    """Incarnation that was told; empty before that."""


def _check_is_here(store: Store, generator_id: str, *, run: str) -> None:
    here = [name for name, gauges in store.roles().items() if gauges.get("role") == "generator" and _is_here(gauges)]
    if generator_id not in here:
        raise ConfigError(f"a generator of run {run!r} must be named, got {generator_id!r}; there are: {_names(here)}.")


def _wait_until_gone(store: Store, generator_id: str) -> None:
    ends_at = time.monotonic() + _PATIENCE_S
    while _is_here(gauges := store.roles().get(generator_id, {})):
        if time.monotonic() >= ends_at:
            give_up(
                f"{generator_id} must leave within {_PATIENCE_S:g} s, it is still {gauges.get('state')} "
                f"({gauges.get('reason') or 'no reason told'}): are it and the broker alive?",
                code=NO_ANSWER,
            )
        time.sleep(_LOOK_EVERY_S)


def _is_here(gauges: dict[str, Any]) -> bool:
    return gauges.get("state", "gone") != "gone"


def _names(ids: list[str]) -> str:
    return ", ".join(sorted(ids)) or "none"
