"""Screens above the list: one trajectory, a group side by side, the sort column, and help."""

from collections.abc import Callable, Sequence

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from slipstream.buffer.archive.trajectory_filter import NAMES
from slipstream.observe.catalog.catalog import SORTABLE
from slipstream.observe.catalog.rows import TrajectoryDetail
from slipstream.runtime.command_line import printable

TOKENS_AT_ONCE = 2048
"""Per page; laying out more would delay key presses."""
CENTERS = {"advantage": 0.0, "learner_log_ratio": 0.0, "ratio": 1.0}
"""Two-sided number -> center; others are colored from minimum to maximum."""
_LOW, _HIGH = (200, 60, 60), (50, 160, 80)
"""Backgrounds far below and above the center; one-sided numbers use the second."""
_WRITTEN_BY_OTHERS = Style(dim=True)


def page_of(detail: TrajectoryDetail, *, name: str, first: int = 0, size: int = TOKENS_AT_ONCE) -> Text:
    """`size` tokens or ids from `first` on, colored by the number `name`. Tokens of other writers are dim."""
    texts = detail.texts or [f"{token} " for token in detail.token_ids]
    numbers = detail.numbers.get(name, [None] * len(texts))
    style = _scale(name, [number for number in numbers if number is not None])
    page = Text(no_wrap=False)
    for index in range(first, min(first + size, len(texts))):
        is_model = detail.model_mask[index]
        # Make control characters and line ends visible.
        text = printable(texts[index]).replace("\n", "↵\n")
        page.append(text, style(numbers[index]) if is_model else _WRITTEN_BY_OTHERS)
    return page


def legend(detail: TrajectoryDetail, *, name: str) -> Text:
    """A number's name and range, with the colors of both ends."""
    numbers = [number for number in detail.numbers.get(name, []) if number is not None]
    if not numbers:
        return Text("no colors: press c to choose a number" if detail.numbers else "no numbers are stored")
    style = _scale(name, numbers)
    low, high = ((f" {number:.4g} ", style(number)) for number in (min(numbers), max(numbers)))
    return Text.assemble(f"{name} from ", low, " to ", high)


def _scale(name: str, numbers: Sequence[float]) -> Callable[[float | None], Style]:
    center = CENTERS.get(name, min(numbers, default=0.0))
    reach = max((abs(number - center) for number in numbers), default=0.0) or 1.0

    def style(number: float | None) -> Style:
        if number is None or number == center:
            return Style()
        share = (number - center) / reach
        color = _HIGH if share > 0 else _LOW
        # Start at a third of the color, so that small differences are visible.
        strength = 0.35 + 0.65 * min(1.0, abs(share))
        red, green, blue = (round(part * strength) for part in color)
        return Style(color="white", bgcolor=f"rgb({red},{green},{blue})")

    return style


PLAIN = ""
"""Name for tokens without colors."""


class TokenScreen(Screen[None]):
    """Trajectories as colored tokens or as messages."""

    BINDINGS = [
        Binding("escape,q", "app.pop_screen", "back"),
        Binding("c", "color", "color"),
        Binding("t", "messages", "tokens/messages"),
        Binding("question_mark", "app.help", "help", key_display="?"),
    ]

    def __init__(self, detail: TrajectoryDetail) -> None:
        super().__init__()
        self._detail = detail
        self._number = next((name for name in ("advantage", *detail.numbers) if name in detail.numbers), PLAIN)
        self._shows_messages = False

    def draw(self) -> None:
        raise NotImplementedError

    def _body(self, detail: TrajectoryDetail, **part: int) -> Text:
        return messages_of(detail) if self._shows_messages else page_of(detail, name=self._number, **part)

    def on_mount(self) -> None:
        self.draw()

    def action_color(self) -> None:
        names = [*self._detail.numbers, PLAIN]
        after = names.index(self._number) + 1 if self._number in names else 0
        self._number, self._shows_messages = names[after % len(names)], False
        self.draw()

    def action_messages(self) -> None:
        self._shows_messages = not self._shows_messages
        self.draw()


class DetailScreen(TokenScreen):
    """One trajectory: its origin, and its colored tokens or messages."""

    CSS = "DetailScreen #facts { height: auto; padding: 0 1 1 1; } DetailScreen #tokens { padding: 0 1; }"
    BINDINGS = [
        Binding("n", "step(1)", "next"),
        Binding("p", "step(-1)", "previous"),
        Binding("g", "group", "group"),
        Binding("right_square_bracket", "pages(1)", "more tokens", key_display="]"),
        Binding("left_square_bracket", "pages(-1)", "earlier", key_display="[", show=False),
    ]

    def __init__(
        self,
        detail: TrajectoryDetail,
        find: Callable[[int], TrajectoryDetail | None],
        show_group: Callable[[str], None],
    ) -> None:
        """`find(offset)` moves by rows and returns that trajectory; None beyond the list."""
        super().__init__(detail)
        self._find = find
        self._show_group = show_group
        self._first_token = 0

    def compose(self) -> ComposeResult:
        yield Static(id="facts")
        with VerticalScroll(can_focus=True):
            yield Static(id="tokens")
        yield Footer()

    def action_step(self, rows: int) -> None:
        if found := self._find(rows):
            self._detail, self._first_token = found, 0
            self.draw()

    def action_group(self) -> None:
        self._show_group(self._detail.row.group_id)

    def action_pages(self, pages: int) -> None:
        first = self._first_token + pages * TOKENS_AT_ONCE
        if 0 <= first < len(self._detail.token_ids):
            self._first_token = first
            self.draw()

    def draw(self) -> None:
        self.query_one("#facts", Static).update(facts_of(self._detail, name=self._number, first=self._first_token))
        self.query_one("#tokens", Static).update(self._body(self._detail, first=self._first_token))
        self.query_one(VerticalScroll).scroll_home(animate=False)


def facts_of(detail: TrajectoryDetail, *, name: str, first: int) -> Text:
    """Format origin, reward, use, and the color legend."""
    row, reward = detail.row, detail.reward
    parts = "".join(f", {part} {value:g}" for part, value in reward.parts.items())
    uses = [
        f"step {use.step}" + ("" if use.lag is None else f" (version {use.version}, lag {use.lag})")
        for use in detail.uses
    ]
    versions = ", ".join(map(str, row.versions))
    advantage = "" if row.advantage is None else f", advantage {row.advantage:+.3f}"
    lines = [
        f"{row.id}  member {row.index} of group {row.group_id}, prompt {row.prompt_uid} of {row.data_source}",
        f"reward {reward.total:g}{parts} ({reward.status}{': ' + reward.detail if reward.detail else ''}){advantage}",
        f"{row.outcome}{': ' + row.reason if row.reason else ''}; trained on in {', '.join(uses) or 'no step'}",
        f"{row.num_tokens} tokens, {sum(detail.model_mask)} of the model's by version {versions}; "
        f"{row.num_turns} turn(s), ended by {row.stop_reason} after {row.seconds:.2f} s on {row.generator_id}",
    ]
    lines += [f"{kind}: {plain}" for kind, plain in (("metrics", detail.metrics), ("extras", detail.extras)) if plain]
    last = min(first + TOKENS_AT_ONCE, row.num_tokens)
    shown = "" if row.num_tokens <= TOKENS_AT_ONCE else f"tokens {first} to {last - 1} of {row.num_tokens}; "
    return Text("\n").join([*(Text(printable(line)) for line in lines), Text(shown) + legend(detail, name=name)])


def messages_of(detail: TrajectoryDetail) -> Text:
    """Return the messages, with roles and token ranges."""
    texts = []
    for message in detail.messages:
        end = message.first_token + message.num_tokens - 1
        reward = "" if message.reward is None else f", reward {message.reward:g}"
        calls = f", {len(message.calls)} tool call(s)" if message.calls else ""
        head = f"{printable(message.role)}  tokens {message.first_token}-{end}{reward}{calls}\n"
        body = printable(message.text) or "(no tokenizer: see the tokens)"
        texts.append(Text.assemble((head, "bold green" if message.is_model else "bold"), body))
    return Text("\n\n").join(texts)


class GroupScreen(TokenScreen):
    """The members of a group side by side."""

    CSS = """
    GroupScreen #members { height: 1fr; overflow-x: auto; }
    GroupScreen .member { width: 1fr; min-width: 34; border-right: solid $primary; padding: 0 1; }
    GroupScreen .member Static { height: auto; }
    """

    def __init__(self, members: list[TrajectoryDetail]) -> None:
        super().__init__(members[0])
        self._members = members

    def compose(self) -> ComposeResult:
        with Horizontal(id="members"):
            for _ in self._members:
                with VerticalScroll(classes="member"):
                    yield Static()
        yield Footer()

    def draw(self) -> None:
        # All members together show as many tokens as one trajectory.
        size = max(1, TOKENS_AT_ONCE // len(self._members))
        for column, detail in zip(self.query(".member Static").results(Static), self._members, strict=True):
            row = detail.row
            advantage = "" if row.advantage is None else f"  advantage {row.advantage:+.3f}"
            head = f"{row.id}\nreward {row.reward_total:g}{advantage}\n{row.num_tokens} tokens, {row.stop_reason}\n"
            more = "" if self._shows_messages or row.num_tokens <= size else f"\n… {row.num_tokens - size} more tokens"
            colors, body = legend(detail, name=self._number), self._body(detail, size=size)
            column.update(Text.assemble((printable(head), "bold"), colors, "\n\n", body, more))


class SortScreen(ModalScreen[str | None]):
    """Selects the sort column."""

    CSS = "SortScreen { align: center middle; } SortScreen OptionList { width: 40; height: 80%; }"
    BINDINGS = [Binding("escape,q", "dismiss(None)", "back")]

    def compose(self) -> ComposeResult:
        yield OptionList(Option("order of archiving", id="stored"), *(Option(name, id=name) for name in SORTABLE))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the selected column; empty for archive order."""
        self.dismiss("" if event.option_id == "stored" else event.option_id)


class HelpScreen(ModalScreen[None]):
    """The keys and the syntax of conditions."""

    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll { width: 92; height: 90%; background: $panel; padding: 1 2; }
    """
    BINDINGS = [Binding("escape,q,question_mark", "dismiss(None)", "back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield Static(Text(HELP))


HELP = f"""The list
  up, down, k, j                 one row
  page up, page down, space      one screen
  home, end                      first and last row
  enter                          open the trajectory
  g                              its group side by side
  /                              search in the text
  f                              conditions
  s, r                           choose the column that sorts; reverse
  x                              remove search and conditions
  u                              read what is new now, not in two seconds
  ?                              this help
  q                              leave

A trajectory, a group
  c                              color by the next number of the tokens
  t                              tokens, or messages with tool calls
  n, p                           next and previous trajectory of the list
  ], [                           later and earlier tokens of a long one
  escape, q                      back

Conditions, all of which must hold
  reward>=0.5 step<=40 outcome=retired text='the answer'
  with >=, <= and =:  reward, tokens, version, step
  with =:  {", ".join(name for name in NAMES if name not in ("reward", "tokens", "version", "step"))}

Colors
  Green is above and red below 0 (advantage) or 1 (ratio). Other numbers
  go from their least, without color, to their greatest, green. Dim
  tokens were not written by the model.
"""
