"""Console output: tables that keep their columns in a pipe, and text that cannot move the terminal's cursor."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 180
"""Characters per line where there is no terminal to ask."""


def make_console() -> Console:
    """Return a console for standard output. Nothing is markup: brackets stand in settings, paths and errors."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_PIPED_WIDTH)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without lines; the columns named in `numbers` are flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: Any) -> None:
    """Append a row of plain text: nothing in a cell is markup."""
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def printable(text: str) -> str:
    """Escape everything but printable characters and line ends: models write terminal control sequences, too."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
