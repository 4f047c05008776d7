"""Reward functions: exact match, share of matching positions, final number of a worked answer."""

import re
from collections import deque
from fractions import Fraction

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, truth_text


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> Reward:
    """Reward 1 if the response equals the ground truth and ends with the end token, else 0."""
    answer, truth = sample.response, truth_text(sample, grader="exact_match")
    if strip:
        answer, truth = answer.strip(), truth.strip()
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    is_correct = answer == truth and sample.stop_reason == "stop"
    return Reward(total=float(is_correct), is_correct=is_correct)


def position_match(sample: RewardInput) -> Reward:
    """Reward the share of matching positions: matches / (max(len(answer), len(truth)) + 1).

    The additional position is the end: it matches if the model wrote its end token where the truth ends. The reward is
    therefore 1 only for a correct answer, and both a missing end and trailing text cost.
    """
    answer, truth = sample.response, truth_text(sample, grader="position_match")
    is_end_right = sample.stop_reason == "stop" and len(answer) == len(truth)
    num_matches = sum(a == t for a, t in zip(answer, truth, strict=False)) + is_end_right
    share = num_matches / (max(len(answer), len(truth)) + 1)
    return Reward(total=share, parts={"positions": share}, is_correct=answer == truth and is_end_right)


_MAX_NUMBER = 100
"""Characters of the longest number: comparing those of millions of digits would take minutes."""
_MINUS = "\u2212"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"[-+]?(?:\\\$|\$)?\s?(?:{_DIGITS})(?:\s?/\s?(?:{_DIGITS}))?"
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]{1,50})\}\{([^{}]{1,50})\}")
# A number is the answer only where no expression goes on behind it: 3\sqrt{2}, 2^{10}, 1e5, 1,2, 7 1/2, 2x, 3 + 4 do.
# Atomic (`?>`): a shorter beginning of the number, with the rest behind it, must not match either.
_ENDED_NUMBER = (
    rf"(?>{_NUMBER})(?![ \t]?\d|[.,:]\d|[\^_{{(]|[eE][-+]?\d|[a-zA-Z]\b|\s?\\(?!text|mathrm|quad|end)[a-zA-Z]"
    r"|\s?[*/+=^-]\s?(?:[\d\\(]|[a-zA-Z]\b))"
)
_ANSWER = re.compile(_ENDED_NUMBER)
_LAST_NUMBER = re.compile(rf"(?<![\w^{{\\.,])({_ENDED_NUMBER})")
_HASHES = re.compile(rf"####\s*(?={_NUMBER})")
_PHRASE = re.compile(rf"answer\s*(?:is|:|=)\s*(?={_NUMBER})", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_WHOLE_NUMBER = re.compile(_NUMBER)
_DECORATION = re.compile(r"\\text\{[^{}]*\}|\\[,;!%$ ]|[$%]")


def math_answer(sample: RewardInput, *, format_reward: float = 0.0) -> Reward:
    """Reward 1 for the right final number, plus `format_reward` for a recognised format, in the manner of GSM8K.

    Numbers are compared exactly: 1,200 = 1200.0 = $1200, 1/2 = 0.5, 5% = 5. A response cut off at its length limit is
    wrong. Raises ValueError for a ground truth that is not one number: formulas, sets and texts need a function that
    understands them.
    """
    truth = true_number(truth_text(sample, grader="math_answer"))
    answer, has_format = final_number(sample.response)
    is_correct = answer == truth and sample.stop_reason == "stop"
    parts = {"answer": float(answer == truth), "format": format_reward * has_format}
    return Reward(total=sum(parts.values()), parts=parts, is_correct=is_correct)


def true_number(text: str) -> Fraction:
    """Read a ground truth: the text behind its last `####`, else in its last box, else all of it. Raises ValueError."""
    _, mark, answer = _plain(text).rpartition("####")
    box = None if mark else _last(_BOX, answer)
    number = _number(box.group(1) if box else answer)
    if number is None:
        raise ValueError(
            f"a ground truth of math_answer must be one number of at most {_MAX_NUMBER} characters, got {text[-60:]!r}"
        )
    return number


def final_number(text: str) -> tuple[Fraction | None, bool]:
    """Extract the final number of a response, None if there is none; and whether it was in a known format.

    Tried in turn: `#### 42`, a boxed LaTeX answer, "the answer is 42", the last number of the text. The last one of a
    kind wins; where it is part of a formula or a list, there is no number.
    """
    text = _plain(text)
    if mark := _last(_HASHES, text):
        number = _number_at(text, mark.end())
    elif box := _last(_BOX, text):
        number = _number(box.group(1))
    elif mark := _last(_PHRASE, text):
        number = _number_at(text, mark.end())
    else:
        found = _last(_LAST_NUMBER, text)
        return (_number(found.group()) if found else None), False
    return number, number is not None


def _plain(text: str) -> str:
    return text.replace(_MINUS, "-").replace("{,}", ",")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _number_at(text: str, start: int) -> Fraction | None:
    found = _ANSWER.match(text, start)
    return _number(found.group()) if found else None


def _number(text: str) -> Fraction | None:
    """Value of a text that is one number and nothing else; None for any other."""
    if len(text) > _MAX_NUMBER:
        return None
    plain = _DECORATION.sub("", text).strip().rstrip(".")
    if found := _FRACTION.fullmatch(plain):
        plain = "{}{}/{}".format(*(part.strip() for part in found.groups()))
    if not _WHOLE_NUMBER.fullmatch(plain):
        return None
    top, slash, bottom = re.sub(r"[,\s]", "", plain).partition("/")
    divisor = Fraction(bottom) if slash else Fraction(1)
    return Fraction(top) / divisor if divisor else None
