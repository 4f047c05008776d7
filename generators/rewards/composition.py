"""RewardFunctions: the reward functions of a run, chosen per row and added with weights."""

import asyncio
import difflib
import inspect
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NoReturn

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig, RewardFunctionConfig
from slipstream.generators.rewards.reward import RewardInput, bind, call, checked, failed_reward
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
"""Short name -> import path of the functions that come with Slipstream."""
REACHING_OUT = {"code", "judge", "pairwise_judge", "reward_model"}
"""Those that run what a model wrote, or talk to an address: only a generator's own settings may name them."""


def full_path(function: str, *, setting: str = "generators.reward") -> str:
    """Return the import path of a short name; any other text with a colon is a path. Raises ConfigError."""
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
    """One loaded function: how to call it, which rows it takes, what its value weighs."""

    def __init__(self, config: RewardFunctionConfig, *, setting: str) -> None:
        """Import the function. Raises ConfigError."""
        path = full_path(config.function, setting=setting)
        found = find_function(path, setting=setting)
        self._function, self._form = bind(found, config.arguments, setting=setting, path=config.function)
        is_async = inspect.iscoroutinefunction
        self.compares = self._form.compares
        """Whether it takes all answers to a prompt at once."""
        # Those that compare are always awaited, so that answers to many prompts may be compared at the same time.
        self.is_async = self.compares or is_async(self._function) or is_async(type(self._function).__call__)
        self.config = config

    def load(self) -> None:
        """Call its method `start`, if it has one."""
        if callable(start := getattr(self._function, "start", None)):
            start()

    def start(self, sample: RewardInput | list[RewardInput]) -> Any:
        """Call the function; the value is a coroutine if it is async."""
        return call(self._function, self._form, sample)

    def result(self, value: Any) -> Reward | None:
        """Return its value as a reward; None where it has no opinion. Raises for what is no reward."""
        reward = self._form.result(value)
        return None if reward is None else checked(reward)


class RewardFunctions:
    """Scores a sample by every function that takes its data source.

    Reward of a row = sum over its functions of weight * value, with one part for each function. Where
    `generators.reward.function` names a single one, its reward stays as it is, with its own parts. Functions that
    compare the answers to a prompt add theirs when the others have scored each answer by itself.
    Invariant: each call ends in a Reward; any exception is one with status `error` and one line of detail.
    """

    def __init__(self, config: RewardConfig, *, on_memory_error: Callable[[], NoReturn] | None = None) -> None:
        """Import all functions. `on_memory_error` ends a process that ran out of memory. Raises ConfigError."""
        self._config = config
        self._on_memory_error = on_memory_error
        settings = [f"generators.reward.functions[{index}]" for index in range(len(config.functions))]
        self._functions = [
            RewardFunction(one, setting=setting)
            for one, setting in zip(config.chosen, settings or ["generators.reward"], strict=True)
        ]
        self.is_async = any(function.is_async for function in self._functions)
        """Whether one of them is `async def`: then `score_async` must be called."""

    def start(self) -> None:
        """Have functions load what takes long, such as a model: those with a method `start`."""
        for function in self._functions:
            function.load()

    def score(self, sample: RewardInput) -> Reward:
        """Return the reward of a sample, where no function is async."""
        name = ""
        try:
            values = []
            for function in self._of(sample):
                name = function.config.part
                values.append((function, function.result(function.start(sample))))
            name = ""
            return self._sum(values)
        except (Exception, SystemExit) as error:
            return self._failed(error, name)

    async def score_async(self, sample: RewardInput) -> Reward:
        """Return the reward of a sample; its async functions run at the same time. Cancelling it cancels them."""
        try:
            functions = self._of(sample)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._result(function, sample)) for function in functions]
            return self._sum([(function, task.result()) for function, task in zip(functions, tasks, strict=True)])
        except BaseExceptionGroup as errors:
            # The first one cancelled the others.
            error = errors.exceptions[0]
            return self._failed(error.__cause__ or error, str(error))
        except Exception as error:
            return self._failed(error, "")

    def compares(self, data_source: str) -> bool:
        """Whether answers of this source are compared with each other."""
        return any(function.compares and function.config.takes(data_source) for function in self._functions)

    def scores_alone(self, data_source: str) -> bool:
        """Whether a function scores answers of this source by themselves."""
        return any(not function.compares and function.config.takes(data_source) for function in self._functions)

    async def compare(self, samples: list[RewardInput]) -> list[Reward]:
        """Return the rewards of answers to one prompt, `RewardInput.reward` included, by the functions that compare."""
        chosen = [each for each in self._functions if each.compares and each.config.takes(samples[0].data_source)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._results(function, samples)) for function in chosen]
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            return [self._failed(error.__cause__ or error, str(error))] * len(samples)
        own = [each.config for each in self._functions if not each.compares]
        decides = any(config.decides for config in own if config.takes(samples[0].data_source))
        rewards = []
        for index, sample in enumerate(samples):
            values = [(function, task.result()[index]) for function, task in zip(chosen, tasks, strict=True)]
            try:
                rewards.append(self._sum(values, own=sample.reward, own_decides=decides))
            except Exception as error:
                rewards.append(self._failed(error, ""))
        return rewards

    async def _results(self, function: RewardFunction, samples: list[RewardInput]) -> list[Reward | None]:
        """Rewards by a function that compares. It must give one for each answer."""

        def read(values: Any) -> list[Reward | None]:
            if len(values) != len(samples):
                raise ValueError(f"it must return one value for each of {len(samples)} answers, got {len(values)}")
            return [None if value is None else function.result(value) for value in values]

        return await self._call(function, samples, read)

    async def _result(self, function: RewardFunction, sample: RewardInput) -> Reward | None:
        return await self._call(function, sample, function.result)

    async def _call(self, function: RewardFunction, given: Any, read: Callable[[Any], Any]) -> Any:
        try:
            value = function.start(given)
            return read(await value if inspect.isawaitable(value) else value)
        except asyncio.CancelledError as error:
            # Raised by the function itself, nobody has cancelled the call.
            if (task := asyncio.current_task()) and not task.cancelling():
                raise _CallFailedError(function.config.part) from error
            raise
        except (Exception, SystemExit) as error:
            raise _CallFailedError(function.config.part) from error

    def _of(self, sample: RewardInput) -> list[RewardFunction]:
        self._config.check_data_source(sample.data_source, found_in="this row")
        if not self.scores_alone(sample.data_source):
            raise ConfigError(
                "an answer by itself, as in an evaluation, must have a function that scores it alone, but those of "
                "this row compare answers: add one to generators.reward.functions, of weight 0 if it is to measure only"
            )
        return [each for each in self._functions if not each.compares and each.config.takes(sample.data_source)]

    def _sum(
        self,
        values: list[tuple[RewardFunction, Reward | None]],
        *,
        own: Reward | None = None,
        own_decides: bool = False,
    ) -> Reward:
        """Weighted sum of the functions' rewards, and of `own`, a sum of others, one of which may decide."""
        known = [(function.config, reward) for function, reward in values if reward is not None]
        if not known:
            raise ValueError("a reward function must return a number for this row, every one returned None")
        if not self._config.functions:
            return known[0][1]
        if failed := next((reward for _, reward in known if reward.status != "ok"), None):
            return failed
        parts = {} if own is None else dict(own.parts)
        for config, reward in known:
            # One of weight 0 is measured, and not added.
            parts[config.part] = (config.weight or 1.0) * reward.total
            parts |= {f"{config.part}/{name}": number for name, number in reward.parts.items()}
        deciding = [reward for config, reward in known if config.decides]
        if own is not None and (own_decides or not deciding):
            deciding.insert(0, own)
        deciding = deciding or [known[0][1]]
        turns = [[config.weight * share for share in reward.turns] for config, reward in known]
        turns += [] if own is None else [own.turns]
        return checked(
            Reward(
                total=sum(config.weight * reward.total for config, reward in known) + (own.total if own else 0.0),
                parts=parts,
                is_correct=all(reward.is_correct for reward in deciding),
                turns=[sum(shares) for shares in zip_longest(*turns, fillvalue=0.0)],
                detail=deciding[0].detail,
            )
        )

    def _failed(self, error: BaseException, name: str) -> Reward:
        if isinstance(error, MemoryError) and self._on_memory_error:
            self._on_memory_error()
        where = f"{name}: " if name and self._config.functions else ""
        if isinstance(error, SystemExit):
            return failed_reward("error", f"{where}the reward function must return, it called sys.exit({error.code!r})")
        # A ConfigError is a sentence of ours, complete in itself.
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        return failed_reward("error", f"{where}{kind}{error}".removesuffix(": "))


class _CallFailedError(Exception):
    """A function raised; its message is the function's part, its cause the function's exception."""
