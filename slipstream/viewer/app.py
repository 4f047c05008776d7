"""ViewerApp: `slipstream view`."""

from textual.app import App

from slipstream.buffer.catalog.catalog import Catalog
from slipstream.viewer.list_screen import ListScreen
from slipstream.viewer.screens import HelpScreen


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
        """Show the keys."""
        self.push_screen(HelpScreen())
