"""RunLogger: a destination of a run's metrics; LoggedRun: the run, as a logger is told of it."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from slipstream.configs.base import Record
from slipstream.runtime.import_path import find_function

Cell = str | int | float


class LoggedRun(Record):
    """Run that a logger writes about.

    Example: LoggedRun("digits_cpu", "digits_cpu-8f3a9c", Path("runs/digits_cpu"), settings={"seed": 0}, first_step=1)
    """

    name: str
    id: str
    """The same after a restart or a resume, and in no other run."""
    folder: Path
    """Run folder."""
    settings: dict[str, Any]
    """Resolved settings, without what may be secret."""
    first_step: int
    """Step of the first row to come: above 1 after a restart or a resume."""


class RunLogger(Protocol):
    """Destination of a run's metrics. Life: (log | image | table)* -> close.

    A class of the user's own is called with the LoggedRun and its `logging.options`, and needs `log` alone. It runs in
    a thread of a process of its own: it may block and raise.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step; after a rollback the same step comes again."""
        ...

    def image(self, step: int, name: str, png: bytes) -> None:
        """Take an image, such as `curve`."""
        ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Take a table, such as `samples`. Its texts are a model's: they may hold markup."""
        ...

    def close(self) -> None:
        """Write what is pending."""
        ...


Kind = Literal["log", "image", "table"]


class Entry(Record):
    """One call of a logger. Example: Entry(3, "log", ({"learner/reward_mean": 0.4},), cursor=3)."""

    step: int
    kind: Kind
    arguments: tuple[Any, ...]
    """Those behind the step."""
    cursor: int = 0
    """Position in the source up to which a logger has the rows with this entry; 0: no news of that."""


def make_logger(name: str, run: LoggedRun, options: Mapping[str, Any]) -> RunLogger:
    """Build a logger by its name in `loggers`. Raises ConfigError, and whatever its library raises."""
    # Imported by name, as each needs a package that may not be installed.
    in_the_box = {
        "trackio": "slipstream.observe.loggers.trackio_logger:TrackioLogger",
        "wandb": "slipstream.observe.loggers.wandb_logger:WandbLogger",
        "tensorboard": "slipstream.observe.loggers.tensorboard_logger:TensorboardLogger",
    }
    logger: RunLogger = find_function(in_the_box.get(name, name), setting="loggers")(run, **options)
    return logger


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics; those of `times` as `times/ROLE/PHASE`, shares of its wall time."""
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}
    for role in row.get("times", {}).get("roles", ()):
        numbers |= {f"times/{role['role']}/{phase}": share for phase, share in role["shares"].items()}
    return numbers


def as_text(text: str) -> str:
    """Return Markdown that shows the text as it is: what a model writes is no markup."""
    escaped = "".join(f"&#{ord(each)};" if each in "\\`*_{}[]()#+-.!|~" else html.escape(each) for each in text)
    return escaped.replace("\n", "<br>")
