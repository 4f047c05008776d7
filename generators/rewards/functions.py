"""Reward functions: exact match, share of matching positions, final number of a worked answer."""

import re
from fractions import Fraction

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> Reward:
    """Reward 1 if the response equals the ground truth and ends with the end token, else 0."""
    answer, truth = sample.response, sample.ground_truth
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
    answer, truth = sample.response, sample.ground_truth
    is_end_right = sample.stop_reason == "stop" and len(answer) == len(truth)
    num_matches = sum(a == t for a, t in zip(answer, truth, strict=False)) + is_end_right
    share = num_matches / (max(len(answer), len(truth)) + 1)
    return Reward(total=share, parts={"positions": share}, is_correct=answer == truth and is_end_right)


_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?"
_FORMATS = (
    re.compile(rf"####\s*\$?\s*({_NUMBER})"),
    re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"),
    re.compile(rf"answer\s*(?:is|:|=)\s*\$?\s*({_NUMBER})", re.IGNORECASE),
)
_ANY_NUMBER = re.compile(_NUMBER)
_LATEX_FRACTION = re.compile(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}")


def math_answer(sample: RewardInput, *, format_reward: float = 0.0) -> Reward:
    """Reward 1 for the right final number, plus `format_reward` for a recognised format, in the manner of GSM8K.

    Numbers are compared exactly: 1,200 = 1200.0 = $1200, 1/2 = 0.5, 5% = 5. A response cut off at its length limit is
    wrong.
    """
    answer, has_format = final_answer(sample.response)
    truth, _ = final_answer(sample.ground_truth)
    is_right = answer is not None and answer == truth
    is_correct = is_right and sample.stop_reason == "stop"
    parts = {"answer": float(is_correct), "format": format_reward * has_format}
    return Reward(total=sum(parts.values()), parts=parts, is_correct=is_correct)


def final_answer(text: str) -> tuple[Fraction | str | None, bool]:
    """Extract the final answer as an exact number, or as text if it is none; and whether it was in a known format.

    Tried in turn: `#### 42`, a boxed LaTeX answer, "the answer is 42", the last number of the text. The last match of a
    kind wins.
    """
    for pattern in _FORMATS:
        if found := pattern.findall(text):
            return _value(found[-1]), True
    numbers = _ANY_NUMBER.findall(text)
    return (_value(numbers[-1]) if numbers else None), False


def _value(text: str) -> Fraction | str:
    plain = _LATEX_FRACTION.sub(r"\1/\2", text)
    plain = re.sub(r"[\s,$%]|\\[!,;%$]|\\text\{[^{}]*\}", "", plain).rstrip(".")
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return plain
