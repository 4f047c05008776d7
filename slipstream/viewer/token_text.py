"""Tokens as text in a terminal, each on a background that shows a number of it. Nothing in them is markup."""

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from slipstream.buffer.catalog.detail import TrajectoryDetail
from slipstream.runtime.console import printable

TOKENS_AT_ONCE = 2048
"""Tokens on one page: laying out more takes longer than a key should."""
CENTRES = {"advantage": 0.0, "learner_log_ratio": 0.0, "ratio": 1.0}
"""Numbers with two sides, and the value between them; all others are shown from their least to their greatest."""
_LOW, _HIGH = (200, 60, 60), (50, 160, 80)
"""Backgrounds far below and far above the centre; one-sided numbers go towards the second."""
_WRITTEN_BY_OTHERS = Style(dim=True)


def page_of(detail: TrajectoryDetail, *, name: str, first: int = 0, size: int = TOKENS_AT_ONCE) -> Text:
    """Return `size` tokens from `first` on, coloured by the number `name`; those that the model did not write are dim.

    Without a tokenizer they are shown as ids.
    """
    texts = detail.texts or [f"{token} " for token in detail.token_ids]
    numbers = detail.numbers.get(name, [None] * len(texts))
    scale = _Scale(name, [number for number in numbers if number is not None])
    page = Text(no_wrap=False)
    for index in range(first, min(first + size, len(texts))):
        is_model = detail.model_mask[index]
        page.append(_visible(texts[index]), scale.style(numbers[index]) if is_model else _WRITTEN_BY_OTHERS)
    return page


def legend(detail: TrajectoryDetail, *, name: str) -> Text:
    """Return the name of a number and its range, on the backgrounds of its ends."""
    numbers = [number for number in detail.numbers.get(name, []) if number is not None]
    if not numbers:
        return Text("no colours: press c to choose a number" if detail.numbers else "no numbers are stored")
    scale = _Scale(name, numbers)
    low, high = min(numbers), max(numbers)
    return Text.assemble(
        f"{name} from ", (f" {low:.4g} ", scale.style(low)), " to ", (f" {high:.4g} ", scale.style(high))
    )


class _Scale:
    """Number -> style."""

    def __init__(self, name: str, numbers: Sequence[float]) -> None:
        self._centre = CENTRES.get(name, min(numbers, default=0.0))
        self._reach = max((abs(number - self._centre) for number in numbers), default=0.0) or 1.0

    def style(self, number: float | None) -> Style:
        if number is None or number == self._centre:
            return Style()
        share = (number - self._centre) / self._reach
        colour = _HIGH if share > 0 else _LOW
        # Half of the colour at the centre: small differences stay visible on light and dark terminals.
        strength = 0.35 + 0.65 * min(1.0, abs(share))
        red, green, blue = (round(part * strength) for part in colour)
        return Style(color="white", bgcolor=f"rgb({red},{green},{blue})")


def _visible(text: str) -> str:
    """Make line ends and control characters visible; a line still ends where it did."""
    return printable(text).replace("\n", "↵\n")
