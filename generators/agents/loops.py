"""Loops: the agent loop of each config, and those that are a few lines."""

import inspect
from functools import partial

from slipstream.broker.messages import Prompt
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import (
    AgentKind,
    CustomAgentConfig,
    EnvironmentAgentConfig,
    ExternalAgentConfig,
    InteractionAgentConfig,
    SearchAgentConfig,
    SingleTurnConfig,
    ToolsAgentConfig,
)
from slipstream.generators.agents.agent import AgentLoop
from slipstream.generators.agents.environment_loop import EnvironmentLoop
from slipstream.generators.agents.episode import Episode
from slipstream.generators.agents.external import Desk, ExternalLoop
from slipstream.generators.agents.interaction_loop import InteractionLoop
from slipstream.generators.agents.search_loop import SearchLoop
from slipstream.generators.agents.tool_loop import ToolLoop
from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime.import_path import load_function


class SingleTurn:
    """Agent loop of one response."""

    def tools(self, prompt: Prompt) -> None:
        """Nothing: the model answers at once."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()


class CustomLoop:
    """Agent loop that is a coroutine function of the user's."""

    def __init__(self, config: CustomAgentConfig, *, setting: str) -> None:
        """Raises ConfigError."""
        function = load_function(config.function, setting=setting, num_values=1, arguments=config.arguments)
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"{setting}.function must be an `async def` function, got {config.function!r}.")
        self._run = partial(function, **config.arguments)

    def tools(self, prompt: Prompt) -> None:
        """Nothing: the function renders its prompts itself."""

    async def run(self, episode: Episode) -> None:
        await self._run(episode)


def build_loop(config: AgentKind, *, encoder: PromptEncoder, setting: str, desk: Desk | None = None) -> AgentLoop:
    """Build the loop that a config describes; `setting` is its key, for messages. Raises ConfigError."""
    match config:
        case SingleTurnConfig():
            return SingleTurn()
        case InteractionAgentConfig():
            return InteractionLoop(config, encoder=encoder, setting=setting)
        case ToolsAgentConfig():
            return ToolLoop(config, encoder=encoder, setting=setting)
        case SearchAgentConfig():
            return SearchLoop(config, encoder=encoder, setting=setting)
        case CustomAgentConfig():
            return CustomLoop(config, setting=setting)
        case EnvironmentAgentConfig():
            return EnvironmentLoop(config, setting=setting)
        case ExternalAgentConfig():
            if desk is None:
                raise ConfigError(
                    f"{setting} may be `external` in runs whose roles are processes, got a run without a token: agents "
                    "outside could not be told from strangers."
                )
            return ExternalLoop(config, desk=desk)
