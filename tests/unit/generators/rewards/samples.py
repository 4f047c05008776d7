"""Well and badly behaved reward functions, imported by name in worker processes."""

import math
import os
import sys
import time
from typing import Any

from slipstream.generators.rewards.reward import RewardInput

NOT_A_FUNCTION = 3


def by_response(sample: RewardInput) -> Any:
    """Executes the response as a command."""
    match sample.response.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            # Holds the interpreter lock: nothing inside the process could stop it.
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
    """Returns a number that depends on its argument."""
    return 0.25 + bonus


def as_dict(sample: RewardInput) -> dict[str, Any]:
    """Returns the fields of a Reward."""
    return {"total": 0.75, "parts": {"a": 0.5, "b": 0.25}, "is_correct": True}


def as_unknown_dict(sample: RewardInput) -> dict[str, Any]:
    """Returns a field that Reward does not have."""
    return {"score": 1.0}


def as_bad_part(sample: RewardInput) -> dict[str, Any]:
    """Returns a part that is not finite."""
    return {"total": 0.75, "parts": {"a": math.inf}}
