"""Input and result of reward functions, and the forms in which functions of other libraries take and give them.

    def my_reward(sample: RewardInput, *, strictness: float = 1.0) -> Reward | float | dict: ...

    def my_comparison(samples: list[RewardInput]) -> list[Reward | float | dict]: ...    # all answers to one prompt

in a module, or a file, that `generators.reward.function=my_module:my_reward` names; keyword arguments come from
`generators.reward.arguments`. It may be `async def`. A class is instantiated once with these arguments, and its
instance is called. It runs in a worker process that is killed at the wall-clock limit, with every process that it
started, and restarted; so it should import nothing large.
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
"""RewardInput -> Reward, dict with the fields of Reward, or number v, which means Reward(v, is_correct=v >= 1)."""


class RewardInput(Record):
    """Input of a reward function.

    Example: RewardInput(prompt="48213=", response="31284", ground_truth="31284", data_source="digits/reverse",
        stop_reason="stop", response_token_ids=[5, 3, 4, 10, 6, 1], extra_info={"index": 17})
    """

    prompt: str | list[dict[str, Any]]
    """Text or chat messages, as in the dataset."""
    response: str
    """The model's text of its last turn, without special tokens."""
    ground_truth: Any
    """Reference answer, any JSON value."""
    data_source: str = ""
    """Kind of task, as named by the dataset."""
    stop_reason: str = "stop"
    """`stop` (the model wrote its end token), `length`, or another reason why the answer ended."""
    response_token_ids: list[int] = []
    """Token ids of that text, including its end token."""
    extra_info: dict[str, Any] = {}
    """Further columns of the dataset's row."""
    messages: list[dict[str, Any]] = []
    """Chat messages after the prompt: turns of the model, and those that it read between them."""
    reward: Reward | None = None
    """For functions that compare answers: what those that score it by itself gave; None without any."""


def model_text(sample: RewardInput) -> str:
    """Return what the model wrote in all of its turns, one below the other."""
    turns = [message.get("content") for message in sample.messages if message.get("role") == "assistant"]
    return "\n".join(turn for turn in turns if isinstance(turn, str)) or sample.response


# --- ground truths ---------------------------------------------------------------------------------------------------
def truth_text(sample: RewardInput, *, grader: str) -> str:
    """Return the ground truth as one text; a number is written out. Raises TypeError for any other form."""
    truth = sample.ground_truth
    if isinstance(truth, str):
        return truth
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return f"{truth:.15g}" if isinstance(truth, float) else str(truth)
    raise TypeError(f"a ground truth of {grader} must be a text or a number, got {_describe(truth)}")


def truth_texts(sample: RewardInput, *, grader: str) -> list[str]:
    """Return the ground truth's alternatives: a text, a list of texts, or a record that holds either as `target`.

    Raises TypeError for any other form.
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
"""Characters of a `detail`, which travels with its trajectory and is stored in the archive."""
_MAX_PARTS = 64
_MAX_PART_NAME = 64


def failed_reward(status: str, detail: str) -> Reward:
    """Build the reward of a failed call: masked in training rather than a silent zero. `status`: error | timeout."""
    return Reward(total=0.0, status=status, detail=_one_line(detail))  # type: ignore[arg-type]


def _one_line(text: str) -> str:
    # Cut twice: a message may hold gigabytes, and blanks that are dropped shorten it. Half a character cannot be sent.
    return " ".join(text[: 2 * _MAX_DETAIL].split())[:_MAX_DETAIL].encode(errors="replace").decode()


def checked(reward: Reward) -> Reward:
    """Return the reward, its `detail` as one line. Raises ValueError for too many parts, or one that is not finite."""
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


# --- forms -----------------------------------------------------------------------------------------------------------
class Form(NamedTuple):
    """Convention of a function: its arguments for a sample, and the meaning of its value."""

    keywords: Callable[[RewardInput], dict[str, Any]] | None
    """Keyword arguments of a call, of which it gets those that it has; None = the sample itself."""
    result: Callable[[Any], Reward | None]
    """Its value as a reward; None where it has no opinion of this sample."""
    compares: bool = False
    """Whether it takes all answers to a prompt at once and returns a value for each."""


def bind(
    function: RewardFunction, arguments: dict[str, Any], *, setting: str, path: str
) -> tuple[RewardFunction, Form]:
    """Return the function with its arguments bound, and its form, which its parameters tell. Raises ConfigError."""
    try:
        if inspect.isclass(function):
            instance: Any = function(**arguments)
            return instance, _form(instance)
        form = _form(function)
        if form.keywords is None:
            inspect.signature(function).bind(None, **arguments)
        else:
            inspect.signature(function).bind_partial(**arguments)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"{setting}.arguments must fit {path!r}, got {arguments}: {error}.") from error
    except Exception as error:
        raise ConfigError(f"{setting}.function={path!r}: {type(error).__name__}: {error}.") from error
    return partial(function, **arguments), form


def call(function: RewardFunction, form: Form, sample: RewardInput | list[RewardInput]) -> Any:
    """Call the function with what it takes. The value is a coroutine if it is `async def`."""
    if form.keywords is None or isinstance(sample, list):
        return function(sample)
    keywords, parameters = form.keywords(sample), inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        keywords = {name: value for name, value in keywords.items() if name in parameters}
    return function(**keywords)


def _form(function: RewardFunction) -> Form:
    parameters = inspect.signature(function).parameters
    return next((form for name, form in _FORMS.items() if name in parameters), _OURS)


def _as_reward(value: Any) -> Reward:
    if isinstance(value, Reward):
        return value
    if isinstance(value, Real):
        return Reward(total=float(value), is_correct=float(value) >= 1)
    if isinstance(value, dict):
        return msgspec.convert(value, Reward)
    raise TypeError(f"a reward must be a Reward, a number or a dict with Reward's fields, got {type(value).__name__}")


def _verl_keywords(sample: RewardInput) -> dict[str, Any]:
    return {
        "data_source": sample.data_source,
        "solution_str": sample.response,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def _verl_batch_keywords(sample: RewardInput) -> dict[str, Any]:
    return {f"{name}s": [value] for name, value in _verl_keywords(sample).items()}


def _verl_reward(value: Any) -> Reward:
    """A number, or a dict with `score`, whose other numbers become parts; `acc` says whether it is correct, `pred` is
    the answer that it extracted."""
    if not isinstance(value, dict):
        return _as_reward(value)
    numbers = {name: float(number) for name, number in value.items() if isinstance(number, Real)}
    if "score" not in numbers:
        raise TypeError(f"a dict of compute_score must have a number `score`, got {', '.join(map(str, value))}")
    score = numbers.pop("score")
    answer = value.get("pred")
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


def _trl_reward(value: Any) -> Reward | None:
    number = _only(value)
    return None if number is None else _as_reward(number)


def _only(values: Any) -> Any:
    try:
        (value,) = values
    except (TypeError, ValueError):
        raise TypeError(
            f"a batched reward function must return one value per answer, got {values!r:.60} for 1"
        ) from None
    return value


_OURS = Form(None, _as_reward)
_FORMS = {
    "solution_str": Form(_verl_keywords, _verl_reward),
    "solution_strs": Form(_verl_batch_keywords, lambda value: _verl_reward(_only(value))),
    "completions": Form(_trl_keywords, _trl_reward),
    "samples": Form(None, _as_reward, compares=True),
}
"""Parameter that gives a form away -> verl's compute_score, the same batched, TRL's batched functions, and our own that
compare answers."""
