"""Reward functions that behave well and badly; worker processes import them by name."""

import math
import os
import sys
import time
from typing import Any

from slipstream.generators.rewards.reward import RewardInput

NOT_A_FUNCTION = 3


def by_response(sample: RewardInput) -> Any:
    """Does what the response says."""
    match sample.response.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            # Holds the interpreter: nothing inside the process could stop this.
            sum(range(10**12))
        case ["raise", word]:
            raise ValueError(f"no good:\n{word}")
        case ["exit"]:
            sys.exit(3)
        case ["die"]:
            os.kill(os.getpid(), 9)
        case ["nan"]:
            return math.nan
        case ["text"]:
            return "0.5"
        case ["print"]:
            print("a reward function may print")
        case ["pid"]:
            return float(os.getpid())
        case ["heavy"]:
            return float(any(name in sys.modules for name in ("torch", "vllm", "transformers")))
    return 0.5


def with_arguments(sample: RewardInput, *, bonus: float) -> float:
    """A number that shows its argument."""
    return 0.25 + bonus


def as_dict(sample: RewardInput) -> dict[str, Any]:
    """The fields of a Reward."""
    return {"total": 0.75, "parts": {"a": 0.5, "b": 0.25}, "is_correct": True}


def as_unknown_dict(sample: RewardInput) -> dict[str, Any]:
    """A field that Reward does not have."""
    return {"score": 1.0}


def as_bad_part(sample: RewardInput) -> dict[str, Any]:
    """One part is not finite."""
    return {"total": 0.75, "parts": {"a": math.inf}}
