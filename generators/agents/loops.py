"""Loops: the agent loop of each config, and those that are a few lines."""

import inspect
from functools import partial

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import (
    AgentKind,
    CustomAgentConfig,
    EnvironmentAgentConfig,
    ExternalAgentConfig,
    InteractionAgentConfig,
    SearchAgentConfig,
    SingleTurnConfig,
    ToolConfig,
    ToolsAgentConfig,
)
from slipstream.generators.agents.agent import AgentLoop
from slipstream.generators.agents.environment_loop import EnvironmentLoop
from slipstream.generators.agents.episode import Episode
from slipstream.generators.agents.external import Desk, ExternalLoop
from slipstream.generators.agents.interaction_loop import InteractionLoop
from slipstream.generators.agents.tool_loop import ToolLoop
from slipstream.generators.tokenization import PromptEncoder
from slipstream.generators.tools.built_in import ToolError
from slipstream.generators.tools.tool import Tool
from slipstream.runtime.import_path import load_function


class SingleTurn(AgentLoop):
    """Agent loop of one response."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()


class CustomLoop(AgentLoop):
    """Agent loop that is a coroutine function of the user's."""

    def __init__(self, config: CustomAgentConfig, *, setting: str) -> None:
        """Raises ConfigError."""
        function = load_function(config.function, setting=setting, num_values=1, arguments=config.arguments)
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"{setting}.function must be an `async def` function, got {config.function!r}.")
        self._run = partial(function, **config.arguments)

    async def run(self, episode: Episode) -> None:
        await self._run(episode)


_STOPS = ("</search>", "</answer>")
_INFORMATION = "\n\n<information>{}</information>\n\n"


class SearchLoop(AgentLoop):
    """Agent loop that answers `<search>query</search>` with `<information>...</information>`, until `<answer>`.

    Source: Search-R1, arXiv:2503.09516.
    """

    def __init__(self, config: SearchAgentConfig, *, encoder: PromptEncoder, setting: str) -> None:
        """Open the index; `setting` is the config's key. Raises ConfigError."""
        self._config = config
        self._shortened = encoder.shortened
        search = ToolConfig(
            function="search",
            arguments={"index": config.index, "topk": config.topk},
            timeout_s=config.search_timeout_s,
            max_concurrency=config.max_concurrency,
        )
        self._search = Tool(search, setting=setting).open({})

    async def run(self, episode: Episode) -> None:
        episode.metrics.update(tool_calls=0, tool_failures=0, invalid_actions=0)
        for number in range(1, self._config.max_turns + 1):
            turn = await episode.generate(max_tokens=self._config.max_turn_tokens, stop=_STOPS)
            action, query = read_action(turn.text)
            if episode.room <= 0 or action == "answer":
                return
            if number == self._config.max_turns:
                episode.stop_reason = "turn_limit"
            elif action:
                episode.observe(_INFORMATION.format(await self._information(episode, query)))
            elif self._config.invalid_action:
                episode.metrics["invalid_actions"] += 1
                episode.observe(self._config.invalid_action)
            else:
                return

    async def _information(self, episode: Episode, query: str) -> str:
        failure = None
        try:
            text = await self._search.call({"query": query})
        except ToolError as error:
            failure, text = error, f"error: {error}"
        episode.metrics.update(tool_calls=1, tool_failures=failure is not None)
        return self._shortened(text.strip(), self._config.max_observation_tokens)


def read_action(text: str) -> tuple[str, str]:
    """Return the name of the tag that ends a turn, and the text within it; both empty without a whole one."""
    for name in ("search", "answer"):
        # In time linear in the text, which may be thousands of opening tags.
        before, end, _ = text.partition(f"</{name}>")
        _, start, body = before.partition(f"<{name}>")
        if start and end:
            return name, body.strip()
    return "", ""


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
