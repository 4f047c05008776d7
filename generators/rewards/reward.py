"""Interface of reward functions, and how they are loaded and called.

    def my_reward(sample: RewardInput, *, strictness: float = 1.0) -> Reward | float | dict: ...

in an importable module, configured as `generators.reward.function=my_module:my_reward`; keyword arguments come from
`generators.reward.arguments`. It runs in a worker process that is killed at the wall-clock limit, with every process
that it started, and restarted; so it should import nothing large.
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
"""RewardInput -> Reward, dict with the fields of Reward, or number v, which means Reward(v, is_correct=v >= 1)."""


class RewardInput(Record):
    """Input of a reward function.

    Example: RewardInput(prompt="48213=", response="31284", ground_truth="31284", data_source="digits/reverse",
        stop_reason="stop", response_token_ids=[5, 3, 4, 10, 6, 1], extra_info={"index": 17})
    """

    prompt: str | list[dict[str, Any]]
    """Text or chat messages, as in the dataset."""
    response: str
    """The model's text, without special tokens."""
    ground_truth: Any
    """Reference answer, any JSON value."""
    data_source: str = ""
    """Kind of task, as named by the dataset."""
    stop_reason: str = "stop"
    """`stop` (the model wrote its end token) | `length` | `aborted`."""
    response_token_ids: list[int] = []
    """Token ids of the response, including its end token."""
    extra_info: dict[str, Any] = {}
    """Further columns of the dataset's row."""


_MAX_DETAIL = 300
"""Characters of a `detail`, which travels with its trajectory and is stored in the archive."""
_MAX_PARTS = 64
_MAX_PART_NAME = 64


def load_reward(path: str, arguments: dict[str, Any]) -> RewardFunction:
    """Import `module:function` and bind its keyword arguments. Raises ConfigError."""
    function = load_function(path, setting="generators.reward", num_values=1, arguments=arguments)
    return partial(function, **arguments)


def evaluate(function: RewardFunction, sample: RewardInput) -> Reward:
    """Call a reward function. Any exception becomes a Reward with status `error` and one line of detail."""
    try:
        return _checked(function(sample))
    except SystemExit as error:
        return failed_reward("error", f"the reward function must return, it called sys.exit({error.code!r})")
    except Exception as error:
        return failed_reward("error", f"{type(error).__name__}: {error}")


def failed_reward(status: str, detail: str) -> Reward:
    """Build the reward of a failed call: masked in training rather than a silent zero. `status`: error | timeout."""
    return Reward(total=0.0, status=status, detail=_one_line(detail))  # type: ignore[arg-type]


def _one_line(text: str) -> str:
    # Cut twice: a message may hold gigabytes, and blanks that are dropped shorten it.
    return " ".join(text[: 2 * _MAX_DETAIL].split())[:_MAX_DETAIL]


def _checked(value: Any) -> Reward:
    reward = _as_reward(value)
    if len(reward.parts) > _MAX_PARTS or any(len(name) > _MAX_PART_NAME for name in reward.parts):
        raise ValueError(
            f"a reward must have at most {_MAX_PARTS} parts with names of at most {_MAX_PART_NAME} characters, got "
            f"{len(reward.parts)} with names of up to {max(map(len, reward.parts))}"
        )
    turns = {f"turns[{index}]": number for index, number in enumerate(reward.turns)}
    for name, number in {"total": reward.total, **reward.parts, **turns}.items():
        # One NaN would spread over the whole group through its mean.
        if not math.isfinite(number):
            raise ValueError(f"a reward must be a finite number, got {name}={number}")
    return msgspec.structs.replace(reward, detail=_one_line(reward.detail)) if reward.detail else reward


def _as_reward(value: Any) -> Reward:
    if isinstance(value, Reward):
        return value
    if isinstance(value, Real):
        return Reward(total=float(value), is_correct=float(value) >= 1)
    if isinstance(value, dict):
        return msgspec.convert(value, Reward)
    raise TypeError(f"a reward must be a Reward, a number or a dict with Reward's fields, got {type(value).__name__}")
