"""Points: places between two related writes at which the harness can kill or stop a role."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

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
