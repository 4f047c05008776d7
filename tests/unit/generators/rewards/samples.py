"""Well and badly behaved reward functions, imported by name in worker processes."""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.reward import RewardInput

NOT_A_FUNCTION = 3
_kept: list[bytearray] = []


def by_response(sample: RewardInput) -> Any:
    match sample.response.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            # Holds the GIL, so nothing inside the process can stop it.
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


class Unready:
    def __init__(self, *, is_mistake: bool) -> None:
        self._error: Exception = ConfigError("path must hold a model.") if is_mistake else OSError("no such device")

    def start(self) -> None:
        raise self._error

    def __call__(self, sample: RewardInput) -> float:
        return 1.0


def with_arguments(sample: RewardInput, *, bonus: float) -> float:
    return 0.25 + bonus


def returning(sample: RewardInput, *, value: Any) -> Any:
    return value


def with_turns(sample: RewardInput, *, turns: Sequence[float] = (0.5, -0.25, 0.25)) -> Reward:
    return Reward(total=sum(turns), turns=list(turns))


class Lengths:
    def __init__(self, *, factor: int) -> None:
        if factor < 1:
            raise ValueError("no such factor")
        self.factor = factor

    def __call__(self, sample: RewardInput) -> float:
        return len(sample.response) * self.factor


def too_few(samples: list[RewardInput]) -> list[float]:
    return [1.0]


def first_only(samples: list[RewardInput]) -> list[float | None]:
    return [1.0, *[None] * (len(samples) - 1)]


def as_verl(data_source, solution_str, ground_truth, extra_info=None):
    """Return a dict with more numbers, and a text, which must not become a part."""
    assert data_source == "digits/reverse"
    return {"score": 0.5, "acc": solution_str == ground_truth, "length": len(solution_str), "pred": solution_str}


def as_verl_number(solution_str, ground_truth, extra_info, **kwargs):
    assert extra_info["unused"] == 3
    return float(solution_str == ground_truth)


async def as_verl_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": 0.5}


def as_verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(a == b)} for a, b in zip(solution_strs, ground_truths, strict=True)]


def as_verl_without_score(solution_str, ground_truth):
    return {"acc": 1.0}


def as_trl(completions, **kwargs):
    assert kwargs["prompts"] == ["48213="]
    assert kwargs["unused"] == [3]
    return [float(len(text)) for text in completions]


def as_trl_column(prompts, completions, answer):
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def as_trl_chat(completions, **kwargs):
    return [float(len(messages[-1]["content"])) for messages in completions]


def as_trl_none(completions, **kwargs):
    return [None] * len(completions)


def as_trl_two(completions, **kwargs):
    return [1.0, 2.0]


_in_flight = 0


async def by_response_async(sample: RewardInput) -> Any:
    global _in_flight
    match sample.response.split():
        case ["wait", seconds]:
            await asyncio.sleep(float(seconds))
        case ["count"]:
            _in_flight += 1
            most = _in_flight
            for _ in range(5):
                await asyncio.sleep(0.01)
                most = max(most, _in_flight)
            _in_flight -= 1
            return float(most)
        case ["block"]:
            await asyncio.sleep(0.1)
            _block()
        case ["child", "block"]:
            await asyncio.gather(asyncio.sleep(0.1), _blocking_child())
        case ["stubborn"]:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)
        case ["cancel"]:
            raise asyncio.CancelledError
        case ["raise", word]:
            raise ValueError(f"no good: {word}")
        case ["leave"]:
            await asyncio.sleep(0.05)
            os._exit(3)
        case ["pid"]:
            return float(os.getpid())
    return 0.5


async def _blocking_child() -> None:
    await asyncio.sleep(0.1)
    _block()


def _block() -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pass
