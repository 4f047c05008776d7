"""`slipstream view`, its keys pressed by Textual's pilot."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Input, Static

from slipstream.buffer.trajectory import Reward
from slipstream.observe.catalog.catalog import open_catalog
from slipstream.observe.viewer import screens
from slipstream.observe.viewer.list_screen import ListScreen, RowList, ViewerApp
from slipstream.observe.viewer.screens import HELP, DetailScreen, GroupScreen, HelpScreen, TokenScreen
from tests.builders import make_finished, write_archive
from tests.unit.slipstream.observe.catalog.test_catalog import byte_tokenizer, group

LETTERS = (*"abcdefgh", "[red]", "Ċ", "ě", "l")
"""Pieces of the tokens: markup of Textual, a line end and an escape character among them."""
NAMES_OF_KEYS = {"slash": "/", "question_mark": "?", "pageup": "page up", "pagedown": "page down"}
NAMES_OF_KEYS |= {"right_square_bracket": "]", "left_square_bracket": "["}
Steps = Callable[[Pilot[None], Path], Awaitable[None]]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    byte_tokenizer(tmp_path / "model", *LETTERS)
    groups = [make_finished(str(number), steps=[number], reward=Reward(number / 400)) for number in range(1, 300)]
    return write_archive(tmp_path / "a", [*groups, group("300", [0.0, 1.0], steps=[300])])


def in_viewer(steps: Steps) -> Callable[[Path], None]:
    """Make a test of the steps, which are taken in a viewer of the archive."""

    async def session(archive: Path) -> None:
        with open_catalog(str(archive), tokenizer=archive.parent / "model") as catalog:
            async with ViewerApp(catalog, name="a").run_test(size=(160, 24)) as pilot:
                await settle(pilot)
                assert current(pilot) == "300-0-1", "newest first"
                await keys(pilot, "r")
                await steps(pilot, archive)

    def test(archive: Path) -> None:
        asyncio.run(session(archive))

    return test


async def settle(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def keys(pilot: Pilot[None], *pressed: str) -> None:
    await pilot.press(*pressed)
    await settle(pilot)


async def enter(pilot: Pilot[None], key: str, line: str) -> None:
    """Press a key that opens the line, and enter this."""
    await pilot.press(key)
    pilot.app.screen.query_one(Input).value = line
    await keys(pilot, "enter")


def current(pilot: Pilot[None]) -> str:
    """Id under the cursor of the list."""
    rows = pilot.app.screen_stack[0].query_one(RowList)
    row = rows.row(rows.cursor)
    return row.id if row else ""


def shown(pilot: Pilot[None], name: str) -> str:
    return str(pilot.app.screen.query_one(name, Static).content)


def screen(pilot: Pilot[None]) -> list[str]:
    """Lines of the list as they are drawn."""
    rows = pilot.app.screen.query_one(RowList)
    return [rows.render_line(line).text for line in range(rows.scrollable_content_region.height)]


@in_viewer
async def test_the_list_scrolls_to_any_row(pilot, archive):
    assert "600 of 600" in shown(pilot, "#status")
    assert not pilot.app.screen.query_one(Input).display, "the line takes no room until it is opened"
    assert screen(pilot)[0].split()[:5] == ["id", "reward", "prompt", "answer", "advantage"]
    assert screen(pilot)[1].split()[:2] == ["1-0-0", "0.003"]
    await keys(pilot, "down", "j")
    assert current(pilot) == "2-0-0"
    await keys(pilot, "pagedown")
    assert screen(pilot)[-1].split()[0] == current(pilot)
    await keys(pilot, "end")
    assert current(pilot) == "300-0-1"
    assert screen(pilot)[-1].split()[:2] == ["300-0-1", "1.000"]
    await keys(pilot, "up", "home", "pageup")
    assert current(pilot) == "1-0-0"


@in_viewer
async def test_rows_are_sorted_filtered_and_searched(pilot, archive):
    await keys(pilot, "s", *["down"] * 10, "enter", "r")
    assert "reward↓" in screen(pilot)[0]
    assert current(pilot) == "300-0-1"
    await enter(pilot, "f", "stop")
    assert "a condition must read NAME=VALUE" in shown(pilot, "#status")
    assert pilot.app.screen.query_one(Input).has_focus, "it can be corrected"
    await enter(pilot, "end", "stop=length")
    assert "0 of 600  stop=length" in shown(pilot, "#status")
    await keys(pilot, "f", "o", "escape", "x")
    assert "600 of 600" in shown(pilot, "#status")
    await enter(pilot, "f", "step<=9 reward>=0.01")
    assert "12 of 600  reward>=0.01 step<=9" in shown(pilot, "#status")
    assert current(pilot) == "9-0-0"
    await enter(pilot, "slash", "gh[red]")
    assert "12 of 600  text='gh[red]'" in shown(pilot, "#status")
    await enter(pilot, "slash", "x")
    assert "0 of 600" in shown(pilot, "#status")
    await keys(pilot, "enter", "g", "down", "x", "r")
    assert current(pilot) == "300-0-0"


@in_viewer
async def test_a_trajectory_is_shown_in_colors_and_as_messages(pilot, archive):
    await keys(pilot, "end", "enter")
    assert isinstance(pilot.app.screen, DetailScreen)
    facts, tokens = shown(pilot, "#facts"), pilot.app.screen.query_one("#tokens", Static).content
    assert "300-0-1  member 1 of group 300" in facts
    assert "advantage from  0.5  to  0.5" in facts
    assert "trained on in step 300" in facts
    assert isinstance(tokens, Text)
    assert tokens.plain == "abcdefgh[red]↵\n\\x1bl", "nothing is markup, and no control character is left"
    assert {str(span.style.bgcolor.name) for span in tokens.spans if span.style.bgcolor} == {"rgb(50,160,80)"}
    await keys(pilot, "c")
    assert "no colors" in shown(pilot, "#facts")
    await keys(pilot, "c")
    assert "logprob from" in shown(pilot, "#facts")
    await keys(pilot, "t")
    assert "prompt  tokens 0-5\nabcdef\n\nassistant  tokens 6-11\ngh[red]" in shown(pilot, "#tokens")
    await keys(pilot, "p", "p", "n", "n", "n")
    assert "300-0-1" in shown(pilot, "#facts")
    await keys(pilot, "p", "escape")
    assert current(pilot) == "300-0-0", "the list follows"


@in_viewer
async def test_a_group_stands_side_by_side(pilot, archive):
    await keys(pilot, "end", "g")
    assert isinstance(pilot.app.screen, GroupScreen)
    columns = [str(column.content) for column in pilot.app.screen.query(".member Static").results(Static)]
    heads = [["300-0-0", "reward 0  advantage -0.500"], ["300-0-1", "reward 1  advantage +0.500"]]
    assert [column.splitlines()[:2] for column in columns] == heads
    await keys(pilot, "c", "t", "escape", "enter", "g", "q", "q")
    assert current(pilot) == "300-0-1"


@in_viewer
async def test_help_names_every_key(pilot, archive):
    await keys(pilot, "question_mark")
    assert isinstance(pilot.app.screen, HelpScreen)
    await keys(pilot, "escape", "enter", "question_mark", "q")
    assert isinstance(pilot.app.screen, DetailScreen)
    for screen_class in (ListScreen, TokenScreen, DetailScreen, RowList):
        for binding in screen_class.BINDINGS:
            for key in binding.key.split(","):
                assert NAMES_OF_KEYS.get(key, key) in HELP, f"{key} of {screen_class.__name__} must be in the help"


@in_viewer
async def test_what_is_archived_meanwhile_appears(pilot, archive):
    await keys(pilot, "end")
    write_archive(archive, [make_finished("301", steps=[301])])
    await keys(pilot, "u")
    await settle(pilot)
    assert "602 of 602" in shown(pilot, "#status")
    assert current(pilot) == "300-0-1", "the cursor stays"
    for shard in archive.glob("*.parquet"):
        shard.unlink()
    await keys(pilot, "enter")
    assert "the files must stay where they were opened" in shown(pilot, "#status")


def test_a_long_trajectory_is_shown_in_pages(archive):
    with open_catalog(str(archive)) as catalog:
        detail = catalog.trajectory("1-0-0")
    assert detail is not None
    assert screens.page_of(detail, name="").plain == "0 1 2 3 4 5 6 7 8 9 10 11 ", "ids without a tokenizer"
    assert screens.page_of(detail, name="", first=10, size=screens.TOKENS_AT_ONCE).plain == "10 11 "
