"""python -m tests.unit.generators.rewards.math_table: prints where the graders of mathematics disagree with the truth.

The pairs of answers in math_pairs.jsonl follow the forms of answers in GSM8K, MATH, AIME and DAPO-Math.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.reward import RewardInput

PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_pairs.jsonl").read_text().splitlines()]
"""{"form": "fractions", "truth": "0.5", "answer": "1/2", "is_equal": true}"""
FORMATS: dict[str, Callable[[str], str]] = {
    "gsm8k": lambda answer: f"So it is\n#### {answer}",
    "math_answer": lambda answer: f"So it is \\boxed{{{answer}}}",
    "dapo_math": lambda answer: f"So it is\nAnswer: {answer}",
    "math": lambda answer: f"So it is $\\boxed{{{answer}}}$",
}
"""Grader -> response with an answer in the form that it asks for."""


@cache
def verdicts(grader: str) -> list[str]:
    """Verdict on each pair: `right`, `missed` (equal, no reward), `accepted` (different, reward), `refused` (truth)."""
    functions, found = RewardFunctions(RewardConfig(grader)), []
    for pair in PAIRS:
        response = FORMATS[grader](pair["answer"])
        reward = functions.score(RewardInput(prompt="", response=response, ground_truth=pair["truth"]))
        if reward.status != "ok":
            found.append("refused")
        elif reward.is_correct == pair["is_equal"]:
            found.append("right")
        else:
            found.append("missed" if pair["is_equal"] else "accepted")
    return found


def table() -> list[str]:
    """Rows of docs/rewards.md: for each form of answer, the verdicts other than `right`."""
    forms = [pair["form"] for pair in PAIRS]
    counts = {grader: Counter(zip(forms, verdicts(grader), strict=True)) for grader in FORMATS}
    sizes = Counter(pair["form"] for pair in PAIRS)
    rows = [f"| form | pairs | {' | '.join(f'`{grader}`' for grader in FORMATS)} |", "|---" * (2 + len(FORMATS)) + "|"]
    for form, size in [*sizes.items(), ("all", len(PAIRS))]:
        cells = []
        for grader in FORMATS:
            wrong = {
                verdict: sum(n for (of, what), n in counts[grader].items() if what == verdict and form in (of, "all"))
                for verdict in ("missed", "accepted", "refused")
            }
            cells.append(", ".join(f"{number} {verdict}" for verdict, number in wrong.items() if number) or "·")
        rows.append(f"| {form} | {size} | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
    for grader in FORMATS:
        for pair, verdict in zip(PAIRS, verdicts(grader), strict=True):
            if verdict in ("missed", "accepted"):
                print(f"{grader:12} {verdict:9} {pair['form']:22} truth {pair['truth']!r:40} answer {pair['answer']!r}")
