"""Well and badly behaved reward functions, imported by name in worker processes."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slipstream.generators.rewards.reward import RewardInput

NOT_A_FUNCTION = 3
_kept: list[bytearray] = []


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
        case ["leave"]:
            os._exit(3)
        case ["litter", file]:
            _litter(Path(file))
            time.sleep(20)
        case ["litter-and-die", file]:
            _litter(Path(file))
            os.kill(os.getpid(), 9)
        case ["fork"]:
            if os.fork() == 0:
                return 0.9
            time.sleep(0.1)
        case ["burn"]:
            until = time.monotonic() + 10
            while time.monotonic() < until:
                pass
        case ["allocate", mib]:
            return float(len(bytearray(int(mib) * 2**20)) > 0)
        case ["leak", mib]:
            # Small enough for any limit in the tests to be met before the end.
            _kept.extend(bytearray(2**20) for _ in range(int(mib)))
        case ["flood", mib]:
            for _ in range(int(mib)):
                print("flood " * (2**20 // 6))
        case ["shout"]:
            raise ValueError("no good: " * 10**6)
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


def _litter(file: Path) -> None:
    """Starts three processes that end by themselves after 20 s, and writes their ids to a file.

    One in this group, one in a session of its own, and one whose parent has ended.
    """
    sleeper = [sys.executable, "-c", "import time; time.sleep(20)"]
    pids = [subprocess.Popen(sleeper, start_new_session=alone).pid for alone in (False, True)]
    orphaning = f"import subprocess; print(subprocess.Popen({sleeper}, start_new_session=True, stdout=-3).pid)"
    pids.append(int(subprocess.run([sys.executable, "-c", orphaning], stdout=subprocess.PIPE, check=True).stdout))
    file.write_text(" ".join(map(str, pids)))


def with_arguments(sample: RewardInput, *, bonus: float) -> float:
    """Returns a number that depends on its argument."""
    return 0.25 + bonus


def as_dict(sample: RewardInput) -> dict[str, Any]:
    """Returns the fields of a Reward."""
    return {"total": 0.75, "parts": {"a": 0.5, "b": 0.25}, "is_correct": True}


def as_unknown_dict(sample: RewardInput) -> dict[str, Any]:
    """Returns a field that Reward does not have."""
    return {"score": 1.0}


def with_long_detail(sample: RewardInput) -> dict[str, Any]:
    """Returns more text than belongs into a record."""
    return {"total": 0.75, "detail": "wordy " * 10**6}


def with_many_parts(sample: RewardInput) -> dict[str, Any]:
    """Returns more parts than belong into a record."""
    return {"total": 0.75, "parts": {str(index): 0.0 for index in range(10**4)}}


def as_bad_part(sample: RewardInput) -> dict[str, Any]:
    """Returns a part that is not finite."""
    return {"total": 0.75, "parts": {"a": math.inf}}
