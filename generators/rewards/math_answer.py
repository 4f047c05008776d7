r"""math_answer: is the final number right? For answers in the manner of GSM8K.

The answer is looked for as `#### 42`, then as `\boxed{42}`, then after "the answer is", and at last as the last number
of the text; the last of a kind wins. Numbers are compared exactly: 1,200 = 1200.0 = $1200, 1/2 = 0.5, 5% = 5.
"""

import re
from fractions import Fraction

from buffer.trajectory import Reward
from generators.rewards.reward import RewardInput

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
