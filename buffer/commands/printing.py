"""What the commands print with: tables that keep their columns in a pipe, and text that no model can break out of."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 180
"""Characters, where there is no terminal to ask."""


def make_console() -> Console:
    """For standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without lines; the columns named in `numbers` are flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: Any) -> None:
    """Plain text in every cell: nothing in it is markup."""
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def printable(text: str) -> str:
    """`text` with everything but letters and line ends spelt out: models write whatever moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def span(values: list[int]) -> str:
    """`3`, `3-5`, or nothing."""
    if not values:
        return ""
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


def distribution(values: list[float]) -> list[str]:
    """Mean, least, 10 %, median, 90 %, greatest."""
    points = np.quantile(values, (0, 0.1, 0.5, 0.9, 1))
    return [f"{value:.4g}" for value in (np.mean(values), *points)]
