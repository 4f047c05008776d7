"""Graders of mathematics: exact numbers, Minerva's normalization of text, and math-verify for formulas."""

import logging
import re
from collections import deque
from fractions import Fraction
from typing import Literal

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, truth_text

# --- numbers ---------------------------------------------------------------------------------------------------------
_MAX_NUMBER = 100
"""Maximum length of a number. Comparing millions of digits would take minutes."""
_MINUS = "\u2212"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"[-+]?(?:\\\$|\$)?\s?(?:{_DIGITS})(?:\s?/\s?(?:{_DIGITS}))?"
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]{1,50})\}\{([^{}]{1,50})\}")
# A number that is not followed by more of an expression, as in 3\sqrt{2}, 2^{10}, 1e5, 1,2, 7 1/2, 2x, 3 + 4, nor by an
# alternative, as in 7 or 8. Atomic (`?>`), so that no prefix of a number matches.
_ENDED_NUMBER = (
    rf"(?>{_NUMBER})(?![ \t]?\d|[.,:]\d|[\^_{{(]|[eE][-+]?\d|[a-zA-Z]\b|\s?\\(?!text|mathrm|quad|end)[a-zA-Z]"
    rf"|\s?[*/+=^-]\s?(?:[\d\\(]|[a-zA-Z]\b)|\s+(?:or|and|to)\s+{_NUMBER})"
)
_ANSWER = re.compile(_ENDED_NUMBER)
_LAST_NUMBER = re.compile(rf"(?<![\w^{{\\.,])({_ENDED_NUMBER})")
_HASHES = re.compile(rf"####\s*(?={_NUMBER})")
_PHRASE = re.compile(rf"answer\s*(?:is|:|=)\s*(?={_NUMBER})", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_WHOLE_NUMBER = re.compile(_NUMBER)
_DECORATION = re.compile(r"\\text\{[^{}]*\}|\\[,;!%$ ]|[$%]")


def math_answer(sample: RewardInput, *, format_reward: float = 0.0) -> Reward:
    """Reward 1 for the right final number, plus `format_reward` for a recognized format, in the style of GSM8K.

    Numbers are compared exactly: 1,200 = 1200.0 = $1200, 1/2 = 0.5, 5% = 5. A response without an end token keeps its
    reward but is not correct. Raises ValueError if the ground truth is not a single number.
    """
    truth = true_number(truth_text(sample, grader="math_answer"))
    answer, has_format = final_number(sample.response)
    is_correct = answer == truth and sample.stop_reason == "stop"
    parts = {"answer": float(answer == truth), "format": format_reward * has_format}
    detail = "" if answer is None else str(answer)
    return Reward(total=sum(parts.values()), parts=parts, is_correct=is_correct, detail=detail)


def true_number(text: str) -> Fraction:
    """Read a ground truth: after its last `####`, else in its last box, else all of it. Raises ValueError."""
    _, mark, answer = _plain(text).rpartition("####")
    box = None if mark else _last(_BOX, answer)
    if (number := _number(box.group(1) if box else answer)) is None:
        raise ValueError(
            f"a ground truth of math_answer must be a number of at most {_MAX_NUMBER} characters, got {text[-60:]!r}"
        )
    return number


def final_number(text: str) -> tuple[Fraction | None, bool]:
    """Return the final number of a response, or None, and whether it was in a known format.

    Tries in order: `#### 42`, a boxed LaTeX answer, "the answer is 42", the last number. The last match of a kind
    counts. If it is part of a formula or list, the result is None.
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
    """Value of a text that is exactly one number, else None."""
    if len(text) > _MAX_NUMBER:
        return None
    plain = _DECORATION.sub("", text).strip().rstrip(".")
    if found := _FRACTION.fullmatch(plain):
        plain = "{}{}/{}".format(*map(str.strip, found.groups()))
    if not _WHOLE_NUMBER.fullmatch(plain):
        return None
    top, slash, bottom = re.sub(r"[,\s]", "", plain).partition("/")
    divisor = Fraction(bottom) if slash else Fraction(1)
    return Fraction(top) / divisor if divisor else None


_TAIL = 300
"""Last characters of a response that gsm8k and dapo_math read, as in verl."""
_STRICT = re.compile(r"####\s*([^\n]*)")
_SEVERAL = re.compile(rf"(?>{_NUMBER}).*?[^\w.,]{_NUMBER}")
_ANY_NUMBER = re.compile(r"-?[\d.,]*\d")


def gsm8k(
    sample: RewardInput, *, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0
) -> Reward:
    """Reward 1 for the right number, `format_score` for a wrong number in the format, else 0.

    strict: the only number after the last `####`, with or without units; `#### 7 or 8` has no answer.
    flexible: the last number. Both read only the end of the response.

    Source: GSM8K, arXiv:2110.14168; verl, utils/reward_score/gsm8k.py. Differs: numbers are compared by value.
    """
    truth = true_number(truth_text(sample, grader="gsm8k"))
    tail = _plain(sample.response[-_TAIL:])
    answer = None
    if method == "flexible":
        answer = _number(found.group()) if (found := _last(_ANY_NUMBER, tail)) else None
    elif found := _last(_STRICT, tail):
        line = found.group(1).strip(" *")
        answer = _number(line)
        if answer is None and not _SEVERAL.search(line):
            answer = _number_at(line, 0)
    is_correct = answer == truth
    total = 1.0 if is_correct else format_score * (answer is not None)
    return Reward(total=total, is_correct=is_correct, detail="" if answer is None else str(answer))


# --- DAPO ------------------------------------------------------------------------------------------------------------
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = [
    *[("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")],
    *[(",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")],
]
_REMOVED = r"""
    square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples \text{s} \text{.} \text{}^2 \text{}^3 \text{}
    \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots
"""
_UNWRAPPED = [
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    *[(re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")],
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
]


def dapo_math(sample: RewardInput) -> Reward:
    """Reward 1 if the last `Answer:` line equals the ground truth after normalization, else -1.

    Source: DAPO, arXiv:2503.14476, eq. 7 and its prompt; normalization of Minerva, arXiv:2206.14858, appendix D.
    """
    found = _last(_ANSWER_LINE, sample.response[-_TAIL:])
    answer = normalized(found.group(1)) if found else None
    is_correct = answer == normalized(truth_text(sample, grader="dapo_math"))
    return Reward(total=1.0 if is_correct else -1.0, is_correct=is_correct, detail=answer or "")


def normalized(answer: str) -> str:
    """Apply Minerva's rules: `x=\\frac12` -> `frac{1}{2}`."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for text in _REMOVED.split():
        answer = answer.replace(text, "")
    for pattern, new in _UNWRAPPED:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "").strip()
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer


# --- math-verify -----------------------------------------------------------------------------------------------------
class MathVerify:
    """Reward 1 if math-verify finds the answer equal to the ground truth, else 0.

    It reads LaTeX and plain formulas, boxed or in the text. A ground truth needs no box. docs/rewards.md lists
    disagreements with other graders.

    Source: https://github.com/huggingface/Math-Verify
    """

    def __init__(self, *, float_rounding: int = 6) -> None:
        # Local import, because it takes seconds.
        from math_verify import parse, verify

        # It warns about disabled timeouts. The pool limits the time.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._parse, self._verify = parse, verify
        self._float_rounding = float_rounding

    def __call__(self, sample: RewardInput) -> Reward:
        truth = truth_text(sample, grader="math")
        known = self._parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None)
        if not known:
            raise ValueError(f"a ground truth of math must be a formula that math-verify reads, got {truth[:60]!r}")
        answer = self._parse(sample.response, parsing_timeout=None)
        is_correct = self._verify(known, answer, float_rounding=self._float_rounding, timeout_seconds=None)
        return Reward(total=float(is_correct), is_correct=is_correct, detail=str(answer[0]) if answer else "")
