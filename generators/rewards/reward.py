"""Reward functions: what one is, and how a dotted path becomes one.

    def my_reward(sample: RewardInput, *, strictness: float = 1.0) -> Reward | float | dict: ...

in a module that Python can import, named in the config as `generators.reward.function=my_module:my_reward`; keyword
arguments come from `generators.reward.arguments`. It is called in a worker process that may be killed at the wall-clock
limit, and it should import nothing large.
"""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import msgspec

from slipstream.buffer.trajectory import Record, Reward
from slipstream.runtime.import_path import load_function

RewardFunction = Callable[..., Any]
"""RewardInput -> Reward, number, or dict with the fields of Reward. A number v means Reward(v, is_correct=v >= 1)."""


class RewardInput(Record):
    """What a reward function sees.

    Example: RewardInput(prompt="48213=", response="31284", ground_truth="31284", data_source="digits/reverse",
        stop_reason="stop", response_token_ids=[5, 3, 4, 10, 6, 1], extra_info={"index": 17})
    """

    prompt: str | list[dict[str, Any]]
    """Text or chat messages, as the dataset has them."""
    response: str
    """What the model wrote, without special tokens."""
    ground_truth: str
    """What is right."""
    data_source: str = ""
    """Kind of task."""
    stop_reason: str = "stop"
    """`stop` (the model ended its answer) | `length` | `aborted`."""
    response_token_ids: list[int] = []
    """The response as sampled, end token included."""
    extra_info: dict[str, Any] = {}
    """Whatever else the row holds."""


def load_reward(path: str, arguments: dict[str, Any]) -> RewardFunction:
    """`module:function` with its keyword arguments bound. Raises ConfigError."""
    function = load_function(path, setting="generators.reward", num_values=1, arguments=arguments)
    return partial(function, **arguments)


def evaluate(function: RewardFunction, sample: RewardInput) -> Reward:
    """Call a reward function. Whatever goes wrong becomes a Reward with status `error` and one line of detail."""
    try:
        return _checked(function(sample))
    except Exception as error:
        return failed_reward("error", f"{type(error).__name__}: {error}")


def failed_reward(status: str, detail: str) -> Reward:
    """A reward that says why there is none: masked in training, never a silent zero. `status` is error | timeout."""
    return Reward(total=0.0, status=status, detail=" ".join(detail.split())[:300])  # type: ignore[arg-type]


def _checked(value: Any) -> Reward:
    reward = _as_reward(value)
    for name, number in {"total": reward.total, **reward.parts}.items():
        if not math.isfinite(number):
            raise ValueError(f"a reward must be a finite number, got {name}={number}")
    return reward


def _as_reward(value: Any) -> Reward:
    if isinstance(value, Reward):
        return value
    if isinstance(value, Real):
        return Reward(total=float(value), is_correct=float(value) >= 1)
    if isinstance(value, dict):
        return msgspec.convert(value, Reward)
    raise TypeError(f"a reward must be a Reward, a number or a dict with Reward's fields, got {type(value).__name__}")
