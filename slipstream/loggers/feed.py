"""Feed: reads the rows of a run and turns them into entries for a logger: numbers, the curve, tables of samples."""

import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.configs.broker import LoggingConfig
from slipstream.loggers.delivery import Delivery
from slipstream.loggers.logger import Entry, numbers_of
from slipstream.loggers.sources import SAMPLE_COLUMNS, RowSource
from slipstream.runtime.clock import Clock


class Bookmark:
    """Position up to which a logger has the rows, and the run's id in its eyes; kept in the run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known: dict[str, Any] = {}
        # A file that a crash cut short is none.
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
        self.cursor = int(known.get("cursor", 0))
        self.id = str(known.get("id") or uuid.uuid4().hex[:12])

    def save(self, cursor: int) -> None:
        """Keep a position; on a full disk the one before stays, and the rows in between come twice after a restart."""
        self.cursor = cursor
        draft = self._path.with_suffix(".new")
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps({"id": self.id, "cursor": cursor}))
            draft.replace(self._path)


class Feed:
    """Life: turn*. Belongs to one thread."""

    def __init__(
        self,
        source: RowSource,
        delivery: Delivery,
        *,
        config: LoggingConfig,
        name: str,
        cursor: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: of the run; `cursor`: position up to which the logger has the rows."""
        self._source = source
        self._delivery = delivery
        self._config = config
        self._clock = clock
        self._cursor = cursor
        self._drawn_at = clock()
        self._curve = _make_curve(source, title=name, cursor=cursor) if config.curve_every_s else None
        self.num_lost = 0
        """Rows that the source did not have any more."""

    def turn(self, *, is_last: bool = False) -> None:
        """Pass on what is new; with `is_last` also the curve, however new the one before. Raises as StoreRows."""
        news = self._source.read(self._cursor)
        self.num_lost += news.num_lost
        self._cursor = news.cursor
        for row in news.rows:
            # With the last one, the logger has them all.
            cursor = news.cursor if row is news.rows[-1] else 0
            self._delivery.put(Entry(row["step"], "log", (numbers_of(row),), cursor))
        if self._curve:
            self._curve.add(news.rows)
        # The last read: where the store goes away meanwhile, no row is missing.
        self._put_samples([row["step"] for row in news.rows])
        if self._curve:
            is_due = is_last or self._clock() - self._drawn_at >= self._config.curve_every_s
            if is_due and self._curve.has_undrawn:
                self._drawn_at = self._clock()
                step, png = self._curve.draw()
                self._delivery.put(Entry(step, "image", ("curve", png)))

    def _put_samples(self, steps: list[int]) -> None:
        every = self._config.samples_every_steps
        # Of one step at a time: a backlog has no answers in the store any more.
        due = [step for step in steps if every and step % every == 0][-1:]
        for step in due:
            if rows := self._source.samples(step, limit=self._config.num_samples):
                self._delivery.put(Entry(step, "table", ("samples", SAMPLE_COLUMNS, rows)))


def _make_curve(source: RowSource, *, title: str, cursor: int) -> Any:
    """Return a Curve that begins with the run, and not with this process."""
    # Imported here, because it imports matplotlib, which a logger without a curve does without.
    from slipstream.loggers.curve import Curve

    curve = Curve(title=title)
    rows = source.read(0).rows if cursor else []
    curve.add(rows[: max(0, len(rows) - len(source.read(cursor).rows))])
    curve.has_undrawn = False
    return curve
