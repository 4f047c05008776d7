"""Journals: messages that each process under chaos sent and received, written before it acts on them.

One file per process and one JSON line per entry, each in one write call, so that SIGKILL loses no written entry.
Timestamps use the machine's clock, so that processes can be compared.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from slipstream.buffer.trajectory import Trajectory

Entry = dict[str, Any]
"""`t`: seconds since 1970; `k`: kind of the entry; the rest depends on the kind."""


class Journal:
    def __init__(self, folder: Path, role: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.role = role
        self._file = os.open(folder / f"{role}.{time.time_ns()}.{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._file, msgspec.json.encode({"t": time.time(), "k": kind} | facts) + b"\n")


class Life(NamedTuple):
    """The journal of one process of a role."""

    role: str
    pid: int
    entries: list[Entry]

    def of(self, *kinds: str) -> list[Entry]:
        return [entry for entry in self.entries if entry["k"] in kinds]

    @property
    def began_at(self) -> float:
        return self.entries[0]["t"]

    @property
    def ended_at(self) -> float:
        return self.entries[-1]["t"]


def read_journals(folder: Path, *, role: str = "", since: float = 0.0) -> list[Life]:
    """Read the nonempty journals (of one role, started after `since`), in start order."""
    lives = []
    for path in sorted(folder.glob(f"{role or '*'}.*"), key=lambda path: int(path.name.split(".")[-2])):
        name, began_ns, pid = path.name.split(".")
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        entries = [msgspec.json.decode(line) for line in whole.splitlines()]
        if int(began_ns) >= since * 1e9 and entries:
            lives.append(Life(name, int(pid), entries))
    return lives


def content_of(trajectory: Trajectory) -> str:
    """Hash all learner inputs of a trajectory; equal before sending, in the learner, and in the archive."""
    digest = xxhash.xxh3_64()
    for array in (trajectory.token_ids, trajectory.model_mask, trajectory.generator_logprobs):
        digest.update(array.tobytes())
    names = (trajectory.id, trajectory.group_id, trajectory.index, trajectory.prompt_uid, trajectory.attempt)
    spans = [(span.first_token, span.version) for span in trajectory.version_spans]
    digest.update(repr((names, spans, trajectory.reward.total, trajectory.stop_reason)).encode())
    return digest.hexdigest()


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Points:
    """The role calls `reach` at each place. The harness requests a signal by a file, which the role removes first."""

    def __init__(self, folder: Path, role: str, *, on_obey: Callable[[str], None] = lambda point: None) -> None:
        self._path = folder / f"{role}.point"
        self._on_obey = on_obey

    def reach(self, point: str) -> bool:
        """Send this process the requested signal; return whether it was stopped and continued."""
        if not self._path.exists():
            return False
        wanted, _, act = self._path.read_text().partition(" ")
        if wanted != point:
            return False
        self._path.unlink()
        self._on_obey(point)
        os.kill(os.getpid(), _SIGNALS[act])
        return True


def ask(folder: Path, role: str, point: str, act: str) -> Path:
    """Ask a role to signal itself at a point; return the request file, which the role removes first."""
    path = folder / f"{role}.point"
    draft = path.with_suffix(".draft")
    draft.write_text(f"{point} {act}")
    return draft.rename(path)
