"""Reasoning of a turn, between marks such as `<think>` and `</think>`, without tool calls."""

from functools import lru_cache
from typing import Any, NamedTuple

import structlog

log = structlog.get_logger(__name__)

_MARKS = (
    ("<think>", "</think>"),  # Qwen 3, DeepSeek, GLM, MiniMax M2, Nemotron 3
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)


class Reasoning(NamedTuple):
    """Marks around the reasoning of a model."""

    start: str
    end: str
    source: str
    """Origin of the marks: `vocabulary`, `chat template`, or `default`."""

    @property
    def is_separate(self) -> bool:
        """Whether messages carry reasoning separately from content. Marks of a mere instruction are content."""
        return self.source != "default"

    def is_opened_by(self, header: str) -> bool:
        """Whether the text before a turn opens its reasoning, as for DeepSeek-R1."""
        return header.rstrip().endswith(self.start)

    def split(self, text: str, *, is_open: bool) -> tuple[str | None, str]:
        """(reasoning, None without marks; rest of the turn). Reasoning without an end takes the rest.

        `is_open`: see `is_opened_by`.
        """
        # An end without a start: the header opened it in a way that `is_opened_by` cannot see.
        is_open = is_open or self.end in text.partition(self.start)[0]
        before, *opened = ((self.start if is_open else "") + text).split(self.start)
        if not opened:
            return None, text
        parts = [part.partition(self.end) for part in opened]
        return "".join(thought for thought, _, _ in parts), before + "".join(rest for _, _, rest in parts)


@lru_cache(maxsize=2)
def find_reasoning(tokenizer: Any) -> Reasoning:
    """Choose the marks that the vocabulary or the chat template has, else `<think>`, and log them."""
    unknown = (None, getattr(tokenizer, "unk_token_id", None))
    template = str(tokenizer.chat_template or "")
    for source, has in (
        ("vocabulary", lambda mark: tokenizer.convert_tokens_to_ids(mark) not in unknown),
        ("chat template", lambda mark: mark in template),
    ):
        if found := next((Reasoning(*marks, source) for marks in _MARKS if has(marks[1])), None):
            break
    reasoning = found or Reasoning(*_MARKS[0], "default")
    log.info("reasoning_marks_chosen", start=reasoning.start, end=reasoning.end, found_in=reasoning.source)
    return reasoning
