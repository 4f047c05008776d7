"""RunLogger: a destination for a run's metrics."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from slipstream.cluster.observers import LOGGERS
from slipstream.configs.base import Record
from slipstream.runtime.import_path import find_function

Cell = str | int | float


class LoggedRun(Record):
    """A run as loggers see it.

    Example: LoggedRun("digits_cpu", "digits_cpu-8f3a9c", Path("runs/digits_cpu"), settings={"seed": 0}, first_step=1)
    """

    name: str
    id: str
    """Unique to the run, also after a resume."""
    folder: Path
    settings: dict[str, Any]
    """Resolved settings without secrets."""
    first_step: int
    """Step of the first row: above 1 after a restart or resume."""


class RunLogger(Protocol):
    """Destination for a run's metrics. Life: (log | image | table)* -> close.

    A user's class is called with the LoggedRun and its arguments in `logging.backends`; only `log` is required. It may
    block and raise.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is repeated after a rollback."""
        ...

    def image(self, step: int, name: str, png: bytes) -> None:
        """Log an image, such as `curve`."""
        ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Log a table, such as `samples`. Texts come from a model and may contain markup."""
        ...

    def close(self) -> None: ...


Kind = Literal["log", "image", "table"]


class Entry(Record):
    """One call to a logger. Example: Entry(3, "log", ({"learner/reward_mean": 0.4},), cursor=3)."""

    step: int
    kind: Kind
    arguments: tuple[Any, ...]
    """Arguments after the step."""
    cursor: int = 0
    """Position once this entry is delivered; 0 if unchanged."""


def make_logger(name: str, run: LoggedRun, options: Mapping[str, Any]) -> RunLogger:
    """Build a logger by its name in `logging.backends`. Raises ConfigError and any error of its library."""
    logger: RunLogger = find_function(LOGGERS.get(name, name), setting="logging.backends")(run, **options)
    return logger


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a metrics row; `times` become `times/ROLE/PHASE`, shares of the wall time."""
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}
    for role in row.get("times", {}).get("roles", ()):
        numbers |= {f"times/{role['role']}/{phase}": share for phase, share in role["shares"].items()}
    return numbers


def as_text(text: str) -> str:
    """Escape Markdown, so that markup in answers is shown literally."""
    escaped = "".join(f"&#{ord(each)};" if each in "\\`*_{}[]()#+-.!|~" else html.escape(each) for each in text)
    return escaped.replace("\n", "<br>")
