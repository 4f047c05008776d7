"""RewardFunctions: selects a run's reward functions per row and adds their weighted rewards."""

import asyncio
import difflib
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig, RewardFunctionConfig
from slipstream.generators.rewards.reward import RewardInput, bind, checked, failed_reward
from slipstream.runtime.import_path import find_function

_FOLDER = "slipstream.generators.rewards"
BUILT_IN = {
    "exact_match": f"{_FOLDER}.functions:exact_match",
    "position_match": f"{_FOLDER}.functions:position_match",
    "math_answer": f"{_FOLDER}.mathematics:math_answer",
    "gsm8k": f"{_FOLDER}.mathematics:gsm8k",
    "math": f"{_FOLDER}.mathematics:MathVerify",
    "dapo_math": f"{_FOLDER}.mathematics:dapo_math",
    "qa_exact_match": f"{_FOLDER}.functions:qa_exact_match",
    "qa_sub_match": f"{_FOLDER}.functions:qa_sub_match",
    "format_tags": f"{_FOLDER}.functions:format_tags",
    "length_penalty": f"{_FOLDER}.functions:length_penalty",
    "repetition_penalty": f"{_FOLDER}.functions:repetition_penalty",
    "reasoning_gym": f"{_FOLDER}.procedural:ReasoningGym",
    "code": f"{_FOLDER}.code_tests:CodeTests",
    "judge": f"{_FOLDER}.judge:Judge",
    "pairwise_judge": f"{_FOLDER}.judge:PairwiseJudge",
    "rank": f"{_FOLDER}.functions:rank",
    "reward_model": f"{_FOLDER}.reward_model:RewardModel",
}
"""Short name -> import path of built-in functions."""
REACHING_OUT = {"code", "judge", "pairwise_judge", "reward_model"}
"""Functions that run code, contact an address, or load a checkpoint. A broker alone may not enable them."""


def full_path(function: str, *, setting: str = "generators.reward") -> str:
    """Expand a short name to its import path. Raises ConfigError."""
    if function in BUILT_IN:
        return BUILT_IN[function]
    if ":" in function:
        return function
    nearest = difflib.get_close_matches(function, BUILT_IN, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(
        f"{setting}.function must look like `module:function` or be one of {', '.join(BUILT_IN)}, got "
        f"{function!r}.{hint}"
    )


class RewardFunction:
    """A loaded function and its config."""

    def __init__(self, config: RewardFunctionConfig, *, setting: str) -> None:
        path = full_path(config.function, setting=setting)
        found = find_function(path, setting=f"{setting}.function")
        self._function, self._form = bind(found, config.arguments, setting=setting, path=config.function)
        is_async = inspect.iscoroutinefunction
        self.compares = self._form.compares
        """Whether it scores all answers to a prompt together."""
        # Comparing functions are awaited, so that many comparisons can run concurrently.
        self.is_async = self.compares or is_async(self._function) or is_async(type(self._function).__call__)
        self.config = config

    def load(self) -> None:
        if callable(start := getattr(self._function, "start", None)):
            start()

    def start(self, sample: RewardInput | list[RewardInput]) -> Any:
        """Call the function by its convention. An async function's result is awaitable."""
        if self._form.keywords is None or isinstance(sample, list):
            return self._function(sample)
        keywords, parameters = self._form.keywords(sample), inspect.signature(self._function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return self._function(**{name: value for name, value in keywords.items() if takes_any or name in parameters})

    def result(self, value: Any) -> Reward | None:
        """Convert to a reward, None = no opinion. Raises for an invalid value."""
        reward = self._form.result(value)
        return None if reward is None else checked(reward)


_Value = tuple[RewardFunction, Reward | None]


class RewardFunctions:
    """Scores a sample with every function that accepts its data source.

    Reward = sum over these functions of weight * value, with a part per function. A single function in
    `generators.reward.function` keeps its own parts. Functions that compare answers run last.
    Invariant: every call returns a Reward. Exceptions become rewards with status `error` and a one-line detail.
    """

    def __init__(self, config: RewardConfig, *, on_memory_error: Callable[[], NoReturn] | None = None) -> None:
        """`on_memory_error`: called when a function runs out of memory. Raises ConfigError."""
        self._config = config
        self._on_memory_error = on_memory_error
        setting = "generators.reward.functions[{}]" if config.functions else "generators.reward"
        self._functions = [RewardFunction(one, setting=setting.format(i)) for i, one in enumerate(config.chosen)]
        self.is_async = any(function.is_async for function in self._functions)
        """Whether to use `score_async`."""

    def start(self) -> None:
        for function in self._functions:
            function.load()

    def score(self, sample: RewardInput) -> Reward:
        """No function may be async."""
        name, values = "", []
        try:
            for function in self._of(sample):
                name = function.config.part
                values.append((function, function.result(function.start(sample))))
            name = ""
            return self._sum(values)
        except (Exception, SystemExit) as error:
            return self._failed(error, name)

    async def score_async(self, sample: RewardInput) -> Reward:
        """Run async functions concurrently. Canceling this cancels them."""
        try:
            functions = self._of(sample)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._call(function, sample, function.result)) for function in functions]
            return self._sum([(function, task.result()) for function, task in zip(functions, tasks, strict=True)])
        except BaseExceptionGroup as errors:
            return self._first_failed(errors)
        except Exception as error:
            return self._failed(error, "")

    async def score_all(self, samples: list[RewardInput], *, compares: bool) -> list[Reward]:
        """Compare answers to one prompt, or score a single answer."""
        if compares:
            return await self.compare(samples)
        return [await self.score_async(samples[0]) if self.is_async else self.score(samples[0])]

    def compares(self, data_source: str) -> bool:
        return any(function.compares and function.config.takes(data_source) for function in self._functions)

    def scores_alone(self, data_source: str) -> bool:
        return any(not function.compares and function.config.takes(data_source) for function in self._functions)

    async def compare(self, samples: list[RewardInput]) -> list[Reward]:
        chosen = [each for each in self._functions if each.compares and each.config.takes(samples[0].data_source)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._results(function, samples)) for function in chosen]
        except BaseExceptionGroup as errors:
            return [self._first_failed(errors)] * len(samples)
        own = [each.config for each in self._functions if not each.compares]
        decides = any(config.counts_for_accuracy for config in own if config.takes(samples[0].data_source))
        rewards = []
        for index, sample in enumerate(samples):
            values = [(function, task.result()[index]) for function, task in zip(chosen, tasks, strict=True)]
            try:
                rewards.append(self._sum(values, own=sample.reward, decides=decides))
            except Exception as error:
                rewards.append(self._failed(error, ""))
        return rewards

    async def _results(self, function: RewardFunction, samples: list[RewardInput]) -> list[Reward | None]:
        def read(values: Any) -> list[Reward | None]:
            if len(values) != len(samples):
                raise ValueError(f"it must return one value per answer ({len(samples)}), got {len(values)}")
            return [None if value is None else function.result(value) for value in values]

        return await self._call(function, samples, read)

    async def _call(self, function: RewardFunction, given: Any, read: Callable[[Any], Any]) -> Any:
        try:
            value = function.start(given)
            return read(await value if inspect.isawaitable(value) else value)
        except asyncio.CancelledError as error:
            # Raised by the function, because this task was not canceled.
            if (task := asyncio.current_task()) and not task.cancelling():
                raise _CallFailedError(function.config.part) from error
            raise
        except (Exception, SystemExit) as error:
            raise _CallFailedError(function.config.part) from error

    def _of(self, sample: RewardInput) -> list[RewardFunction]:
        self._config.check_data_source(sample.data_source, found_in="this row")
        if not self.scores_alone(sample.data_source):
            raise ConfigError(
                "a single answer, as in an evaluation, requires a function that scores it individually, but those of "
                "this row compare answers: add one to generators.reward.functions, with weight 0 if it only measures"
            )
        return [each for each in self._functions if not each.compares and each.config.takes(sample.data_source)]

    def _sum(self, values: list[_Value], *, own: Reward | None = None, decides: bool = False) -> Reward:
        """Weighted sum, plus an earlier sum `own`. `decides`: `own` counts for `is_correct`."""
        known = [(function.config, reward) for function, reward in values if reward is not None]
        if not known:
            raise ValueError("a reward function must return a number for this row, every one returned None")
        if not self._config.functions:
            return known[0][1]
        if failed := next((reward for _, reward in known if reward.status != "ok"), None):
            return failed
        base = own or Reward(total=0.0)
        parts = dict(base.parts)
        for config, reward in known:
            # A weight of 0 only measures.
            parts[config.part] = (config.weight or 1.0) * reward.total
            parts |= {f"{config.part}/{name}": number for name, number in reward.parts.items()}
        deciding = [reward for config, reward in known if config.counts_for_accuracy]
        if own is not None and (decides or not deciding):
            deciding.insert(0, own)
        deciding = deciding or [known[0][1]]
        turns = [base.turns, *([config.weight * share for share in reward.turns] for config, reward in known)]
        reward = Reward(
            total=base.total + sum(config.weight * reward.total for config, reward in known),
            parts=parts,
            is_correct=all(reward.is_correct for reward in deciding),
            turns=[sum(shares) for shares in zip_longest(*turns, fillvalue=0.0)],
            detail=deciding[0].detail,
        )
        return checked(reward)

    def _first_failed(self, errors: BaseExceptionGroup[BaseException]) -> Reward:
        # The first error canceled the other functions.
        return self._failed(errors.exceptions[0].__cause__ or errors.exceptions[0], str(errors.exceptions[0]))

    def _failed(self, error: BaseException, name: str) -> Reward:
        if isinstance(error, MemoryError) and self._on_memory_error:
            self._on_memory_error()
        where = f"{name}: " if name and self._config.functions else ""
        if isinstance(error, SystemExit):
            return failed_reward("error", f"{where}the reward function must return, it called sys.exit({error.code!r})")
        # The message of a ConfigError is a complete sentence.
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        # Last line of the user's own code.
        paths = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
        libraries = ("<frozen ", str(Path(__file__).parents[2]), *paths)
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(libraries)]
        place = f", at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""
        return failed_reward("error", f"{where}{kind}{error}".removesuffix(": ") + place)


class _CallFailedError(Exception):
    """A function's exception is the cause, its part the message."""
