"""SearchLoop: the model searches a corpus within tags and answers within tags; Search-R1, arXiv:2503.09516."""

import re

from slipstream.broker.messages import Prompt
from slipstream.configs.generators import SearchAgentConfig, ToolConfig
from slipstream.generators.agents.episode import Episode
from slipstream.generators.tokenization import PromptEncoder
from slipstream.generators.tools.built_in import ToolError
from slipstream.generators.tools.tool import Tool

_STOPS = ("</search>", "</answer>")
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_INFORMATION = "\n\n<information>{}</information>\n\n"


class SearchLoop:
    """Agent loop that answers `<search>query</search>` with `<information>...</information>`, until `<answer>`."""

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

    def tools(self, prompt: Prompt) -> None:
        """Nothing: the prompt tells the model how to search."""

    async def run(self, episode: Episode) -> None:
        episode.metrics.update(tool_calls=0, tool_failures=0, invalid_actions=0)
        for number in range(1, self._config.max_turns + 1):
            turn = await episode.generate(max_tokens=self._config.max_turn_tokens, stop=_STOPS)
            found = _ACTION.search(turn.text)
            if episode.room <= 0 or (found and found.group(1) == "answer"):
                return
            if number == self._config.max_turns:
                episode.stop_reason = "turn_limit"
            elif found:
                episode.observe(_INFORMATION.format(await self._information(episode, found.group(2).strip())))
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
