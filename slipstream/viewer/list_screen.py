"""ViewerApp: `slipstream view`; ListScreen: a catalog as a list that is searched, filtered and sorted."""

import msgspec
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from slipstream.buffer.catalog.catalog import Catalog, CatalogQuery, Page
from slipstream.buffer.catalog.conditions import format_conditions, parse_conditions
from slipstream.buffer.catalog.detail import TrajectoryDetail
from slipstream.buffer.errors import ReplayBufferError, SearchCancelledError
from slipstream.configs.base import ConfigError
from slipstream.runtime.console import printable
from slipstream.viewer.row_list import RowList, headings
from slipstream.viewer.screens import DetailScreen, GroupScreen, HelpScreen, SortScreen

_REFRESH_S = 2.0
"""Time between two looks for what is new."""
_FIRST_ROWS = 256


class ListScreen(Screen[None]):
    """The list of a catalog. Queries run in a thread: keys are answered while a search reads gigabytes."""

    # Not CSS, which Textual does not load for the screen that an application begins with.
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
        self._query = CatalogQuery()
        self._edited = ""

    def compose(self) -> ComposeResult:
        yield Static(id="status")
        yield RowList(self._read)
        yield Input(id="line")
        yield Footer()

    def on_mount(self) -> None:
        self._list = self.query_one(RowList)
        self._list.focus()
        self._run_query(self._query, keeps_cursor=False)
        self.set_interval(_REFRESH_S, self.action_update)

    # --- queries -----------------------------------------------------------------------------------------------------
    def _read(self, start: int, size: int) -> Page:
        return self._catalog.page(self._query, start=start, size=size)

    @work(thread=True, exclusive=True, group="query")
    def _run_query(self, query: CatalogQuery, *, keeps_cursor: bool) -> None:
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

    def _show(self, query: CatalogQuery, page: Page, *, keeps_cursor: bool) -> None:
        self._query = query
        columns = headings(query.sort_by, is_descending=query.is_descending)
        self._list.show(page, headings=columns, keeps_cursor=keeps_cursor)
        self._tell("")

    def _tell(self, state: str) -> None:
        """Show what is on the screen, and in which state."""
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

    # --- keys --------------------------------------------------------------------------------------------------------
    def action_edit(self, what: str) -> None:
        self._edited = what
        line = self.query_one("#line", Input)
        where = self._query.where
        line.value = (where.text or "") if what == "text" else format_conditions(where)
        line.placeholder = "text in prompt or response" if what == "text" else "reward>=0.5 step<=40 outcome=retired"
        line.add_class("open")
        line.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            where = (
                msgspec.structs.replace(self._query.where, text=event.value or None)
                if self._edited == "text"
                else parse_conditions(event.value)
            )
        except ConfigError as error:
            self._tell(str(error))
            return
        self._close_line()
        self._run_query(msgspec.structs.replace(self._query, where=where), keeps_cursor=False)

    def action_close_line(self) -> None:
        self._close_line()
        self._tell("")

    def _close_line(self) -> None:
        self.query_one("#line", Input).remove_class("open")
        self._list.focus()

    def action_sort(self) -> None:

        def sort(column: str | None) -> None:
            if column is not None:
                self._run_query(msgspec.structs.replace(self._query, sort_by=column), keeps_cursor=False)

        self.app.push_screen(SortScreen(), sort)

    def action_reverse(self) -> None:
        query = msgspec.structs.replace(self._query, is_descending=not self._query.is_descending)
        self._run_query(query, keeps_cursor=False)

    def action_clear(self) -> None:
        query = CatalogQuery(sort_by=self._query.sort_by, is_descending=self._query.is_descending)
        self._run_query(query, keeps_cursor=False)

    def action_group(self) -> None:
        row = self._list.row(self._list.cursor)
        if row:
            self.show_group(row.group_id)

    def show_group(self, group_id: str) -> None:
        try:
            members = self._catalog.group(group_id)
        except ReplayBufferError as error:
            self._tell(str(error))
            return
        if members:
            self.app.push_screen(GroupScreen(members))

    def on_row_list_chosen(self) -> None:
        if found := self._find_beside(0):
            self.app.push_screen(DetailScreen(found, self._find_beside, self.show_group))

    def _find_beside(self, rows: int) -> TrajectoryDetail | None:
        """Move the cursor of the list, and return the trajectory there; None beyond its ends, or when it is gone."""
        index = self._list.cursor + rows
        row = self._list.row(index)
        if row is None:
            return None
        self._list.action_go(index)
        try:
            return self._catalog.trajectory(row.id)
        except ReplayBufferError as error:
            self._tell(str(error))
            return None


class ViewerApp(App[None]):
    """The list of a catalog, and the screens over it."""

    TITLE = "slipstream view"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, catalog: Catalog, *, name: str) -> None:
        """`name` is that of the source."""
        super().__init__()
        self._catalog = catalog
        self._source = name

    def get_default_screen(self) -> ListScreen:
        return ListScreen(self._catalog, name=self._source)

    def action_help(self) -> None:
        self.push_screen(HelpScreen())
