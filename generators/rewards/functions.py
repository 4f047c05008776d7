"""math_answer: is the final number right? For answers in the manner of GSM8K.

The answer is looked for as `#### 42`, then as `\boxed{42}`, then after "the answer is", and at last as the last number
of the text; the last of a kind wins. Numbers are compared exactly: 1,200 = 1200.0 = $1200, 1/2 = 0.5, 5% = 5.
"""

import re
from fractions import Fraction

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput


# @@ exact_match: all or nothing.
def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> Reward:
    """1 when the response equals the truth and the model ended its answer itself, else 0."""
    answer, truth = sample.response, sample.ground_truth
    if strip:
        answer, truth = answer.strip(), truth.strip()
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    is_correct = answer == truth and sample.stop_reason == "stop"
    return Reward(total=float(is_correct), is_correct=is_correct)


# @@ position_match: the share of places that are right, the end of the answer being one of them.
def position_match(sample: RewardInput) -> Reward:
    """right places / places, where places = longer of answer and truth, and one more for the end.

    The end is right when the model wrote its end token where the truth ends. So the reward is 1 exactly for a correct
    answer, and neither a missing end nor anything written after the answer is free.
    """
    answer, truth = sample.response, sample.ground_truth
    ends_right = sample.stop_reason == "stop" and len(answer) == len(truth)
    num_right = sum(a == t for a, t in zip(answer, truth, strict=False)) + ends_right
    share = num_right / (max(len(answer), len(truth)) + 1)
    return Reward(total=share, parts={"positions": share}, is_correct=answer == truth and ends_right)


_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?"
_FORMATS = (
    re.compile(rf"####\s*\$?\s*({_NUMBER})"),
    re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"),
    re.compile(rf"answer\s*(?:is|:|=)\s*\$?\s*({_NUMBER})", re.IGNORECASE),
)
_ANY_NUMBER = re.compile(_NUMBER)
_LATEX_FRACTION = re.compile(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}")


def math_answer(sample: RewardInput, *, format_reward: float = 0.0) -> Reward:
    """1 for the right number, plus `format_reward` when one of the formats was used; cut-off answers count as wrong."""
    answer, has_format = final_answer(sample.response)
    truth, _ = final_answer(sample.ground_truth)
    is_right = answer is not None and answer == truth
    is_correct = is_right and sample.stop_reason == "stop"
    parts = {"answer": float(is_correct), "format": format_reward * has_format}
    return Reward(total=sum(parts.values()), parts=parts, is_correct=is_correct)


def final_answer(text: str) -> tuple[Fraction | str | None, bool]:
    """The final answer as an exact number (or as text, when it is none), and whether it stood in one of the formats."""
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
