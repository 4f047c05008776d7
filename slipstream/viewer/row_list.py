"""RowList: the rows of a query as a scrolled list of any length, of which only what is on the screen is read."""

from collections.abc import Callable
from datetime import UTC, datetime

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from slipstream.buffer.catalog.catalog import Page
from slipstream.buffer.catalog.rows import CatalogRow
from slipstream.runtime.console import printable

_ROWS_READ = 256
"""Rows read at a time, so that scrolling by lines reads seldom."""


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%m-%d %H:%M:%S")


def _number(value: float | None, form: str = "g") -> str:
    return "" if value is None else f"{value:{form}}"


COLUMNS: dict[str, tuple[str, int, Callable[[CatalogRow], str]]] = {
    "id": ("id", 22, lambda row: row.id),
    "reward_total": (
        "reward",
        8,
        lambda row: _number(row.reward_total, ".3f") if row.reward_status == "ok" else row.reward_status,
    ),
    "advantage": ("advantage", 9, lambda row: _number(row.advantage, "+.3f")),
    "num_tokens": ("tokens", 7, lambda row: str(row.num_tokens)),
    "num_turns": ("turns", 5, lambda row: str(row.num_turns)),
    "oldest_version": ("versions", 9, lambda row: "-".join(map(str, sorted({row.oldest_version, row.newest_version})))),
    "lag": ("lag", 4, lambda row: _number(row.lag)),
    "last_step": ("steps", 9, lambda row: ",".join(map(str, row.steps))),
    "outcome": ("outcome", 11, lambda row: row.outcome),
    "stop_reason": ("stop", 8, lambda row: row.stop_reason),
    "generator_id": ("generator", 12, lambda row: row.generator_id),
    "data_source": ("source", 14, lambda row: row.data_source),
    "prompt_uid": ("prompt", 20, lambda row: row.prompt_uid),
    "finished_at": ("finished", 14, lambda row: _moment(row.finished_at)),
    "reason": ("reason", 20, lambda row: row.reason),
}
"""Column of a catalog -> its heading, its width, and its text in a row."""
WIDTH = sum(width + 1 for _, width, _ in COLUMNS.values())


class RowList(ScrollView, can_focus=True):
    """Rows with a cursor. `show` gives it a result; it asks `read` for the rows that it draws."""

    DEFAULT_CSS = "RowList { height: 1fr; }"
    BINDINGS = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move_pages(-1)", "page up", show=False),
        Binding("pagedown,space", "move_pages(1)", "page down", show=False),
        Binding("home", "go(0)", "first", show=False),
        Binding("end", "go(-1)", "last", show=False),
        Binding("enter", "choose", "open"),
    ]

    class Chosen(Message):
        """The row under the cursor was chosen."""

    def __init__(self, read: Callable[[int, int], Page]) -> None:
        """`read(start, size)` returns rows of the result that is shown."""
        super().__init__()
        self._read = read
        self._page = Page(0, 0, [])
        self._headings = ""
        self.cursor = 0
        """Index of the row under the cursor in the result."""

    def show(self, first: Page, *, headings: str, keeps_cursor: bool) -> None:
        """Show a new result, of which `first` is the beginning, below the headings of its columns."""
        self._page, self._headings = first, headings
        self.virtual_size = Size(WIDTH, first.num_rows + 1)
        self._go(min(self.cursor, max(0, first.num_rows - 1)) if keeps_cursor else 0)
        self.refresh()

    @property
    def num_rows(self) -> int:
        return self._page.num_rows

    def row(self, index: int) -> CatalogRow | None:
        """Return a row of the result; None beyond its end."""
        if not 0 <= index < self.num_rows:
            return None
        offset = index - self._page.start
        if not 0 <= offset < len(self._page.rows):
            self._page = self._read(max(0, index - _ROWS_READ // 2), _ROWS_READ)
            offset = index - self._page.start
        return self._page.rows[offset] if offset < len(self._page.rows) else None

    def render_line(self, y: int) -> Strip:
        """Draw one line of the screen: the headings stay at the top."""
        scrolled_x, scrolled_y = self.scroll_offset
        index = scrolled_y + y - 1
        row = self.row(index) if y else None
        look = Style(bold=True) if y == 0 else Style(reverse=row is not None and index == self.cursor)
        line = line_of(row) if row else "" if y else self._headings
        style = self.rich_style + look
        return Strip([Segment(line, style)]).crop_extend(scrolled_x, scrolled_x + self.size.width, style)

    def action_move(self, lines: int) -> None:
        self._go(self.cursor + lines)

    def action_move_pages(self, pages: int) -> None:
        self._go(self.cursor + pages * max(1, self.scrollable_content_region.height - 2))

    def action_go(self, index: int) -> None:
        """Move the cursor to a row; -1 is the last one."""
        self._go(self.num_rows - 1 if index < 0 else index)

    def action_choose(self) -> None:
        self.post_message(self.Chosen())

    def on_click(self, event: Click) -> None:
        """Move the cursor to the row that was clicked, or choose it when it is there."""
        index = self.scroll_offset.y + event.y - 1
        if index == self.cursor:
            self.action_choose()
        elif event.y and index < self.num_rows:
            self._go(index)

    def _go(self, index: int) -> None:
        self.cursor = max(0, min(index, self.num_rows - 1))
        # Two lines high: the headings cover the one above.
        self.scroll_to_region(Region(self.scroll_offset.x, self.cursor, 1, 2), animate=False, force=True)
        self.refresh()


def line_of(row: CatalogRow) -> str:
    """Return the texts of a row in columns of fixed width, cut where they are longer."""
    cells = ((text(row), width) for _, width, text in COLUMNS.values())
    return " ".join(f"{printable(cell)[:width]:<{width}}" for cell, width in cells)


def headings(sort_by: str, *, is_descending: bool) -> str:
    """Return the headings in the same columns, with an arrow at the one that sorts."""
    arrow = "↓" if is_descending else "↑"
    names = (
        (heading + arrow if column == sort_by else heading, width) for column, (heading, width, _) in COLUMNS.items()
    )
    return " ".join(f"{name[:width]:<{width}}" for name, width in names)
