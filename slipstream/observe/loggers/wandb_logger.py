"""WandbLogger: logs to Weights & Biases. Only this module imports wandb."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import wandb
from PIL import Image

from slipstream.observe.loggers.logger import Cell, LoggedRun


class WandbLogger:
    """A run in a wandb project. A resume continues it. `mode`: online, offline, or disabled."""

    def __init__(self, run: LoggedRun, *, project: str = "slipstream", mode: str | None = None, **options: Any) -> None:
        """`options`: more arguments for `wandb.init`, such as `entity`, `group`, and `tags`."""
        given = {"name": run.name, "id": run.id, "resume": "allow", "dir": str(run.folder), "config": run.settings}
        # wandb would record this process, which is not the user's code.
        settings = wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True)
        self._run = wandb.init(project=project, mode=mode, settings=settings, **(given | options))
        # A rollback repeats steps, which wandb's own step counter would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def image(self, step: int, name: str, png: bytes) -> None:
        self._run.log({"step": step, name: wandb.Image(Image.open(BytesIO(png)))})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._run.log({"step": step, name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def close(self) -> None:
        self._run.finish()
