"""InteractionLoop: a simulated user answers and scores the turns of the model; the classes have verl's form."""

import asyncio
from functools import partial
from typing import Any

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import InteractionAgentConfig, InteractionConfig
from slipstream.generators.agents.episode import Episode
from slipstream.generators.agents.tool_loop import ToolLoop
from slipstream.generators.errors import PromptError
from slipstream.generators.tokenization import PromptEncoder
from slipstream.generators.tools.tool import call_either
from slipstream.runtime.import_path import find_function

_END_S = 5.0
"""Longest end of a conversation."""
_METHODS = ("start_interaction", "generate_response", "finalize_interaction")


class InteractionLoop(ToolLoop):
    """Agent loop with a simulated user: one object for all answers, which tells them apart by an id."""

    def __init__(self, config: InteractionAgentConfig, *, encoder: PromptEncoder, setting: str) -> None:
        """Import tools and users; `setting` is the config's key. Raises ConfigError."""
        super().__init__(config, encoder=encoder, setting=setting)
        if not config.interactions:
            raise ConfigError(f"{setting}.interactions must name at least one class, got none.")
        self._users: dict[str, Any] = {}
        for number, each in enumerate(config.interactions):
            user = InteractionConfig(function=each) if isinstance(each, str) else each
            built, name = _build(user, setting=f"{setting}.interactions[{number}]")
            if name in self._users:
                raise ConfigError(f"{setting}.interactions must have different names, got {name} twice: set `name`.")
            self._users[name] = built

    async def run(self, episode: Episode) -> None:
        prompt = episode.prompt
        given = {"ground_truth": prompt.ground_truth} | (prompt.extra_info.get("interaction_kwargs") or {})
        name = given.get("name") or next(iter(self._users))
        if name not in self._users:
            raise PromptError(
                f"prompt {prompt.uid} names the interaction {name!r}, so the agent's `interactions` must have it, got "
                f"{', '.join(self._users)}: add it, or change interaction_kwargs.name"
            )
        user = self._users[name]
        found = await call_either(partial(user.start_interaction, episode.id, **given))
        own_id = found if isinstance(found, str) else episode.id
        try:
            await self.converse(episode, partial(_answer, user, own_id, given))
        finally:
            try:
                async with asyncio.timeout(_END_S):
                    await call_either(partial(user.finalize_interaction, own_id, **given))
            except TimeoutError:
                raise TimeoutError(f"finalize_interaction must end within {_END_S:g} s, it did not") from None
        _pay(episode, 0.0)


async def _answer(user: Any, own_id: str, given: dict[str, Any], episode: Episode) -> str | None:
    """Have the user answer and score the last turn; None if the conversation is over."""
    prompt = episode.prompt.prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    found = await call_either(partial(user.generate_response, own_id, [*asked, *episode.messages], **given))
    match found:
        case (bool() as is_over, str() as text, bool() | int() | float() as score, dict() as info):
            _pay(episode, float(score))
        case _:
            raise TypeError(
                f"generate_response must return (is it over, text, score, record), got {str(found)[:200]} from "
                f"{type(user).__name__}"
            )
    numbers = {str(key): value for key, value in info.items() if isinstance(value, int | float)}
    episode.metrics.update(numbers)
    return None if is_over else text


def _pay(episode: Episode, score: float) -> None:
    """Give the last turn its score, and those before it without one, which called tools, nothing."""
    missing = episode.transcript.num_turns - len(episode.turn_rewards)
    episode.turn_rewards += [0.0] * (missing - 1) + [score] * (missing > 0)


def _build(config: InteractionConfig, *, setting: str) -> tuple[Any, str]:
    found = find_function(config.function, setting=setting)
    try:
        user = found(config.arguments)
    except Exception as error:
        raise ConfigError(
            f"{setting}.function must name a class that is made with one record, got {config.function!r}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if missing := [name for name in _METHODS if not callable(getattr(user, name, None))]:
        raise ConfigError(f"{setting}.function must have the methods {', '.join(_METHODS)}, but lacks {missing[0]}.")
    return user, config.name or found.__name__
