"""Curve: the picture of a run's rows that loggers get."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg

from slipstream.launch.plot import STYLE, draw, is_drawn


class Curve:
    """Keeps of each row what is drawn. Life: add* -> (draw | add)*."""

    def __init__(self, *, title: str) -> None:
        self._title = title
        self._rows: list[dict[str, Any]] = []
        self.has_undrawn = False
        """Whether rows came since the last picture."""

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        before = len(self._rows)
        self._rows += [{key: value for key, value in row.items() if is_drawn(key)} for row in rows]
        self.has_undrawn |= len(self._rows) > before

    def draw(self) -> tuple[int, bytes]:
        """Return the newest step, and a PNG of all of them."""
        self.has_undrawn = False
        file = BytesIO()
        with mpl.rc_context(STYLE):
            FigureCanvasAgg(draw(self._rows, title=self._title)).print_png(file)
        return self._rows[-1]["step"], file.getvalue()
