"""ViewerApp: `slipstream view`. ListScreen: a catalog as a list to search, filter, and sort."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from slipstream.buffer.archive.trajectory_filter import format_conditions, parse_conditions
from slipstream.buffer.errors import ReplayBufferError, SearchCancelledError
from slipstream.configs.base import ConfigError
from slipstream.observe.catalog.catalog import Catalog, CatalogQuery, Page, open_catalog
from slipstream.observe.catalog.rows import CatalogRow, TrajectoryDetail
from slipstream.observe.viewer.screens import DetailScreen, GroupScreen, HelpScreen, SortScreen
from slipstream.runtime.command_line import printable

_ROWS_READ = 256
"""Rows per read, so that scrolling by lines rarely reads."""


def _number(value: float | None, form: str = "g") -> str:
    return "" if value is None else f"{value:{form}}"


COLUMNS: dict[str, tuple[str, int, Callable[[CatalogRow], str]]] = {
    "id": ("id", 22, lambda row: row.id),
    "reward_total": (
        "reward",
        8,
        lambda row: _number(row.reward_total, ".3f") if row.reward_status == "ok" else row.reward_status,
    ),
    "prompt": ("prompt", 28, lambda row: row.prompt[-28:]),
    "answer": ("answer", 36, lambda row: row.answer),
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
    "prompt_uid": ("prompt id", 20, lambda row: row.prompt_uid),
    "finished_at": ("finished", 14, lambda row: f"{datetime.fromtimestamp(row.finished_at, UTC):%m-%d %H:%M:%S}"),
    "reason": ("reason", 20, lambda row: row.reason),
}
"""Catalog column -> (heading, width, text of a row)."""
WIDTH = sum(width + 1 for _, width, _ in COLUMNS.values())


class RowList(ScrollView, can_focus=True):
    """Rows with a cursor, read when drawn."""

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
        """`read(start, size)` returns rows of the current result."""
        super().__init__()
        self._read = read
        self._page = Page(0, 0, [])
        self._headings = ""
        self.cursor = 0

    def show(self, first: Page, *, headings: str, keeps_cursor: bool) -> None:
        self._page, self._headings = first, headings
        self.virtual_size = Size(WIDTH, first.num_rows + 1)
        self._go(min(self.cursor, max(0, first.num_rows - 1)) if keeps_cursor else 0)
        self.refresh()

    @property
    def num_rows(self) -> int:
        return self._page.num_rows

    def row(self, index: int) -> CatalogRow | None:
        if not 0 <= index < self.num_rows:
            return None
        offset = index - self._page.start
        if not 0 <= offset < len(self._page.rows):
            self._page = self._read(max(0, index - _ROWS_READ // 2), _ROWS_READ)
            offset = index - self._page.start
        return self._page.rows[offset] if offset < len(self._page.rows) else None

    def render_line(self, y: int) -> Strip:
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
        self._go(self.num_rows - 1 if index < 0 else index)

    def action_choose(self) -> None:
        self.post_message(self.Chosen())

    def on_click(self, event: Click) -> None:
        index = self.scroll_offset.y + event.y - 1
        if index == self.cursor:
            self.action_choose()
        elif event.y and index < self.num_rows:
            self._go(index)

    def _go(self, index: int) -> None:
        self.cursor = max(0, min(index, self.num_rows - 1))
        # Two lines high: the headings cover the line above.
        self.scroll_to_region(Region(self.scroll_offset.x, self.cursor, 1, 2), animate=False, force=True)
        self.refresh()


def line_of(row: CatalogRow) -> str:
    """Format a row in columns, truncating longer texts."""
    cells = ((text(row), width) for _, width, text in COLUMNS.values())
    return " ".join(f"{printable(cell)[:width]:<{width}}" for cell, width in cells)


def headings(sort_by: str, *, is_descending: bool) -> str:
    """Format the headings, with an arrow at the sort column."""
    arrow = "↓" if is_descending else "↑"
    names = ((heading + arrow * (column == sort_by), width) for column, (heading, width, _) in COLUMNS.items())
    return " ".join(f"{name[:width]:<{width}}" for name, width in names)


_REFRESH_S = 2.0
_NEWEST_FIRST = CatalogQuery(is_descending=True)
_FIRST_ROWS = 256


class ListScreen(Screen[None]):
    """The list. Queries run in a thread, so that keys keep working."""

    # Not `CSS`, which Textual does not load for an application's first screen.
    DEFAULT_CSS = """
    ListScreen #status { height: 1; }
    ListScreen #line { display: none; }
    ListScreen #line.open { display: block; }
    """
    BINDINGS = [
        Binding("slash", "edit('text')", "search", key_display="/"),
        Binding("f", "edit('conditions')", "filter"),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("g", "group", "group"),
        Binding("x", "clear", "all rows"),
        Binding("u", "update", "update", show=False),
        Binding("question_mark", "app.help", "help", key_display="?"),
        Binding("q", "app.quit", "leave"),
        Binding("escape", "close_line", "back", show=False),
    ]

    def __init__(self, catalog: Catalog, *, name: str) -> None:
        super().__init__()
        self._catalog = catalog
        self._source = name
        self._query = _NEWEST_FIRST
        self._edited = ""

    def compose(self) -> ComposeResult:
        yield Static(id="status")
        yield RowList(self._read)
        yield Input(id="line")
        yield Footer()

    def on_mount(self) -> None:
        self._list = self.query_one(RowList)
        self._list.focus()
        self._run_query(self._query)
        self.set_interval(_REFRESH_S, self.action_update)

    def _read(self, start: int, size: int) -> Page:
        return self._catalog.page(self._query, start=start, size=size)

    @work(thread=True, exclusive=True, group="query")
    def _run_query(self, query: CatalogQuery, *, keeps_cursor: bool = False) -> None:
        worker = get_current_worker()
        self.app.call_from_thread(self._tell, "reading ...")
        try:
            page = self._catalog.page(query, size=_FIRST_ROWS, is_cancelled=lambda: worker.is_cancelled)
        except SearchCancelledError:
            return
        except (ConfigError, ReplayBufferError) as error:
            self.app.call_from_thread(self._tell, str(error))
            return
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, query, page, keeps_cursor=keeps_cursor)

    def _change(self, **fields: Any) -> None:
        self._run_query(msgspec.structs.replace(self._query, **fields))

    def _show(self, query: CatalogQuery, page: Page, *, keeps_cursor: bool) -> None:
        self._query = query
        columns = headings(query.sort_by, is_descending=query.is_descending)
        self._list.show(page, headings=columns, keeps_cursor=keeps_cursor)
        self._tell("")

    def _tell(self, state: str) -> None:
        where = format_conditions(self._query.where)
        total = self._catalog.rows.num_rows
        parts = [self._source, f"{self._list.num_rows:,} of {total:,}", where, state, *self._catalog.notes]
        self.query_one("#status", Static).update(Text(printable("  ".join(filter(None, parts)))))

    @work(thread=True, exclusive=True, group="update")
    def action_update(self) -> None:
        try:
            is_new = self._catalog.refresh()
        except ReplayBufferError as error:
            self.app.call_from_thread(self._tell, str(error))
            return
        if is_new:
            self.app.call_from_thread(self._run_query, self._query, keeps_cursor=True)
        elif self._catalog.notes:
            self.app.call_from_thread(self._tell, "")

    def action_edit(self, what: str) -> None:
        self._edited = what
        line = self.query_one("#line", Input)
        where = self._query.where
        line.value = (where.text or "") if what == "text" else format_conditions(where)
        line.placeholder = "text in prompt or response" if what == "text" else "reward>=0.5 step<=40 outcome=retired"
        line.add_class("open")
        line.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        with self._telling_errors():
            if self._edited == "text":
                where = msgspec.structs.replace(self._query.where, text=event.value or None)
            else:
                where = parse_conditions(event.value)
            self.action_close_line()
            self._change(where=where)

    @contextmanager
    def _telling_errors(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, ReplayBufferError) as error:
            self._tell(str(error))

    def action_close_line(self) -> None:
        self.query_one("#line", Input).remove_class("open")
        self._list.focus()
        self._tell("")

    def action_sort(self) -> None:
        def sort(column: str | None) -> None:
            if column is not None:
                self._change(sort_by=column)

        self.app.push_screen(SortScreen(), sort)

    def action_reverse(self) -> None:
        self._change(is_descending=not self._query.is_descending)

    def action_clear(self) -> None:
        self._change(where=CatalogQuery().where)

    def action_group(self) -> None:
        if row := self._list.row(self._list.cursor):
            self.show_group(row.group_id)

    def show_group(self, group_id: str) -> None:
        with self._telling_errors():
            if members := self._catalog.group(group_id):
                self.app.push_screen(GroupScreen(members))

    def on_row_list_chosen(self) -> None:
        if found := self._find_beside(0):
            self.app.push_screen(DetailScreen(found, self._find_beside, self.show_group))

    def _find_beside(self, rows: int) -> TrajectoryDetail | None:
        """Move the cursor; return that trajectory, None beyond the ends."""
        index = self._list.cursor + rows
        if row := self._list.row(index):
            self._list.action_go(index)
            with self._telling_errors():
                return self._catalog.trajectory(row.id)
        return None


class ViewerApp(App[None]):
    """The list of a catalog and the screens above it."""

    TITLE = "slipstream view"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, catalog: Catalog, *, name: str) -> None:
        super().__init__()
        self._catalog = catalog
        self._source = name

    def get_default_screen(self) -> ListScreen:
        return ListScreen(self._catalog, name=self._source)

    def action_help(self) -> None:
        self.push_screen(HelpScreen())


def view(where: str, *, tokenizer: Path | None, run: str | None, runs_dir: Path) -> None:
    """Open a catalog in the terminal. Raises ConfigError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "slipstream view must run in a terminal, got a pipe or a file: `slipstream data ls` prints trajectories."
        )
    with open_catalog(where, run_name=run, runs_dir=runs_dir, tokenizer=tokenizer) as catalog:
        ViewerApp(catalog, name=where).run()
