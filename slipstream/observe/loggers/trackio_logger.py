"""TrackioLogger: logs to trackio, on this machine or in a Space. Only this module imports trackio."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import trackio
from PIL import Image

from slipstream.observe.loggers.logger import Cell, LoggedRun, as_text


class TrackioLogger:
    """A run in a trackio project. A resume continues it."""

    def __init__(self, run: LoggedRun, *, project: str = "slipstream", **options: Any) -> None:
        """`options`: more arguments for `trackio.init`, such as `space_id`."""
        given = {"name": run.id, "resume": "allow", "config": run.settings, "embed": False}
        quiet = {"auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project=project, **(given | quiet | options))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def image(self, step: int, name: str, png: bytes) -> None:
        self._run.log({name: trackio.Image(Image.open(BytesIO(png)))}, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        # Trackio renders text as Markdown.
        shown = [[as_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._run.log({name: trackio.Table(columns=list(columns), data=shown)}, step=step)

    def close(self) -> None:
        trackio.finish()
