"""Input and result of reward functions, and adapters for those of other libraries.

    def my_reward(sample: RewardInput, *, strictness: float = 1.0) -> Reward | float | dict: ...

    def my_comparison(samples: list[RewardInput]) -> list[Reward | float | dict]: ...    # all answers to one prompt

Select a function by module or file, as in `generators.reward.function=my_module:my_reward`. It may be `async def`. Its
keyword arguments come from `generators.reward.arguments`. A class is instantiated once with these arguments. Functions
should not import large libraries, because workers restart after a timeout.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import msgspec

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError, Record

RewardFunction = Callable[..., Any]
"""RewardInput -> Reward, a dict with its fields, or a number v: Reward(v, is_correct=v >= 1)."""


class RewardInput(Record):
    """Input of a reward function.

    Example: RewardInput(prompt="48213=", response="31284", ground_truth="31284", data_source="digits/reverse",
        stop_reason="stop", response_token_ids=[5, 3, 4, 10, 6, 1], extra_info={"index": 17})
    """

    prompt: str | list[dict[str, Any]]
    """Text or chat messages, as in the dataset."""
    response: str
    """Text of the last model turn, without special tokens."""
    ground_truth: Any
    """Any JSON value."""
    data_source: str = ""
    """Kind of task."""
    stop_reason: str = "stop"
    """`stop` (the model wrote its end token), `length`, or another reason."""
    response_token_ids: list[int] = []
    """Includes the end token."""
    extra_info: dict[str, Any] = {}
    """Other columns of the dataset row."""
    messages: list[dict[str, Any]] = []
    """Chat messages after the prompt."""
    reward: Reward | None = None
    """Reward of the other functions, if any, for functions that compare."""


def model_text(sample: RewardInput) -> str:
    """Text of all model turns."""
    turns = [message.get("content") for message in sample.messages if message.get("role") == "assistant"]
    return "\n".join(turn for turn in turns if isinstance(turn, str)) or sample.response


# --- ground truths ---------------------------------------------------------------------------------------------------
def truth_text(sample: RewardInput, *, grader: str) -> str:
    """Ground truth, a text or number, as text. Raises TypeError."""
    truth = sample.ground_truth
    if isinstance(truth, str):
        return truth
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return f"{truth:.15g}" if isinstance(truth, float) else str(truth)
    raise TypeError(f"a ground truth of {grader} must be a text or a number, got {_describe(truth)}")


def truth_texts(sample: RewardInput, *, grader: str) -> list[str]:
    """Ground truth's alternatives: a string, a list of strings, or a record with either as `target`.

    Raises TypeError.
    """
    truth = sample.ground_truth
    if isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    texts = [truth] if isinstance(truth, str) else truth
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"a ground truth of {grader} must be a text, a list of texts, or a record with either as `target`, got "
            f"{_describe(sample.ground_truth)}"
        )
    return texts


def _describe(value: object) -> str:
    kinds = {dict: "a record", list: "a list", str: "a text", type(None): "nothing"}
    return f"{kinds.get(type(value), f'a {type(value).__name__}')} ({str(value)[:40]})"


# --- results ---------------------------------------------------------------------------------------------------------
_MAX_DETAIL = 300
"""Maximum length of a `detail`."""
_MAX_PARTS = 64
_MAX_PART_NAME = 64


def failed_reward(status: str, detail: str) -> Reward:
    """Build the reward of a failed call, which training masks. `status`: error | timeout."""
    return Reward(total=0.0, status=status, detail=_one_line(detail))  # type: ignore[arg-type]


def _one_line(text: str) -> str:
    # Truncated first, because a message may be huge. Lone surrogates cannot be sent.
    return " ".join(text[: 2 * _MAX_DETAIL].split())[:_MAX_DETAIL].encode(errors="replace").decode()


def checked(reward: Reward) -> Reward:
    """Reward with a one-line `detail`. Raises ValueError for too many parts or non-finite values."""
    if len(reward.parts) > _MAX_PARTS or any(len(name) > _MAX_PART_NAME for name in reward.parts):
        raise ValueError(
            f"a reward must have at most {_MAX_PARTS} parts with names of at most {_MAX_PART_NAME} characters, got "
            f"{len(reward.parts)} with names of up to {max(map(len, reward.parts))}"
        )
    turns = {f"turns[{index}]": number for index, number in enumerate(reward.turns)}
    for name, number in {"total": reward.total, **reward.parts, **turns}.items():
        # A NaN would spread to the whole group through its mean.
        if not math.isfinite(number):
            raise ValueError(f"a reward must be a finite number, got {name}={number}")
    return msgspec.structs.replace(reward, detail=_one_line(reward.detail)) if reward.detail else reward


# --- forms -----------------------------------------------------------------------------------------------------------
class Form(NamedTuple):
    """Calling convention of a reward function."""

    keywords: Callable[[RewardInput], dict[str, Any]] | None
    """Builds keyword arguments. Unknown ones are dropped. None = pass the sample."""
    result: Callable[[Any], Reward | None]
    """Converts the returned value to a reward, None = no opinion."""
    compares: bool = False
    """Whether it takes all answers to a prompt."""


def bind(
    function: RewardFunction, arguments: dict[str, Any], *, setting: str, path: str
) -> tuple[RewardFunction, Form]:
    """Bind arguments and detect the calling convention. Raises ConfigError."""
    try:
        if inspect.isclass(function):
            instance: Any = function(**arguments)
            return instance, _form(instance)
        form, signature = _form(function), inspect.signature(function)
        if form.keywords is None:
            signature.bind(None, **arguments)
        else:
            signature.bind_partial(**arguments)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"{setting}.arguments must fit {path!r}, got {arguments}: {error}.") from error
    except Exception as error:
        raise ConfigError(f"{setting}.function={path!r}: {type(error).__name__}: {error}.") from error
    return partial(function, **arguments), form


def _form(function: RewardFunction) -> Form:
    parameters = inspect.signature(function).parameters
    return next((form for name, form in _FORMS.items() if name in parameters), _OURS)


def _as_reward(value: Any) -> Reward:
    if isinstance(value, Reward):
        return value
    if isinstance(value, Real):
        return Reward(total=float(value), is_correct=float(value) >= 1)
    if isinstance(value, dict) and "total" in value:
        return msgspec.convert(value, Reward)
    if isinstance(value, dict) and "score" in value:
        return _verl_reward(value)
    raise TypeError(
        "a reward must be a Reward, a number, or a dict with `total` (Reward's fields) or `score` (verl's), got "
        f"{value!r:.60}, a {type(value).__name__}"
    )


def _verl_keywords(sample: RewardInput) -> dict[str, Any]:
    same = {name: getattr(sample, name) for name in ("data_source", "ground_truth", "extra_info")}
    return {"solution_str": sample.response, **same}


def _verl_reward(value: Any) -> Reward:
    """Convert a number, or a dict: `score` is the reward, `acc` decides correctness, `pred` is the extracted answer,
    and all numbers but `score` become parts."""
    if not isinstance(value, dict):
        return _as_reward(value)
    numbers = {name: float(number) for name, number in value.items() if isinstance(number, Real)}
    if "score" not in numbers:
        raise TypeError(f"a dict of compute_score must have a number `score`, got {', '.join(map(str, value))}")
    score, answer = numbers.pop("score"), value.get("pred")
    detail = "" if answer is None else str(answer)
    return Reward(total=score, parts=numbers, is_correct=numbers.get("acc", score) >= 1, detail=detail)


def _trl_keywords(sample: RewardInput) -> dict[str, Any]:
    is_chat = isinstance(sample.prompt, list)
    messages = sample.messages or [{"role": "assistant", "content": sample.response}]
    columns = {"data_source": sample.data_source, "ground_truth": sample.ground_truth} | sample.extra_info
    return {name: [value] for name, value in columns.items()} | {
        "prompts": [sample.prompt],
        "completions": [messages if is_chat else sample.response],
        "completion_ids": [sample.response_token_ids],
        "trainer_state": None,
    }


def _only(values: Any) -> Any:
    try:
        (value,) = values
    except (TypeError, ValueError):
        must = "a batched reward function must return one value per answer"
        raise TypeError(f"{must}, got {values!r:.60} for 1") from None
    return value


_OURS = Form(None, _as_reward)
_FORMS = {
    "solution_str": Form(_verl_keywords, _verl_reward),
    "solution_strs": Form(
        lambda sample: {f"{name}s": [value] for name, value in _verl_keywords(sample).items()},
        lambda value: _verl_reward(_only(value)),
    ),
    "completions": Form(_trl_keywords, lambda value: None if (number := _only(value)) is None else _as_reward(number)),
    "samples": Form(None, _as_reward, compares=True),
}
"""Parameter that identifies a convention -> verl's compute_score, its batched version, TRL's functions, and our
comparing functions."""
