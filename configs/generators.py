"""The generator role: engine, sampling, reward, scaling."""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slipstream.configs.base import Config, ConfigError
from slipstream.configs.engines import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig


class AutoscaleConfig(Config):
    """Bounds and thresholds of automatic scaling, one generator at a time."""

    min: Annotated[int, Meta(ge=1)] = 1
    """Fewest generators at any time."""
    max: Annotated[int, Meta(ge=1)] = 4
    """Most generators at any time."""
    more_above: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Add one when the learner waits for groups for a larger share of its time."""
    fewer_below: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Remove one when the generators together run a smaller share of what they could, and one fewer could still run it.
    """
    settle_s: Annotated[float, Meta(gt=0)] = 60.0
    """Time measured before each change, seconds; it starts when the learner and all generators are at work."""
    absent_after_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest wait for a generator that is not at work, seconds; then the others are measured without it."""


class SamplingConfig(Config):
    """Sampling of training trajectories; evaluation sets its own temperature."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Divisor of the logits, in the engine and in the learner."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Probability mass of nucleus sampling; 1 = all tokens."""
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """Most likely tokens that may be sampled; -1 = all."""
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    """Most tokens that the model writes in an answer, over all of its turns."""


class RewardFunctionConfig(Config):
    """One of several reward functions.

    Example: RewardFunctionConfig(function="gsm8k", data_sources=["openai/gsm8k"], weight=1.0, decides=True)
    """

    function: str
    """As `generators.reward.function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments bound to the function."""
    name: str = ""
    """Part of the reward that holds its weighted value; empty = the function's own name."""
    weight: float = 1.0
    """Factor of its value in the sum; 0 = it is measured only, and its part holds its value."""
    data_sources: list[str] = []
    """Rows that it scores: values of `data_source`, or patterns such as `math*`; empty = every row."""
    decides: bool = False
    """Whether an answer must be correct by it to count in `accuracy`; where no function of a row decides, its first one
    does."""

    def takes(self, data_source: str) -> bool:
        """Return whether it scores rows of this data source."""
        return not self.data_sources or any(fnmatchcase(data_source, pattern) for pattern in self.data_sources)

    @property
    def part(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class RewardConfig(Config):
    """Reward functions and their limits."""

    function: str = "position_match"
    """A function that comes with Slipstream (docs/rewards.md), `module:function`, or `file.py:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments bound to the function."""
    functions: list[RewardFunctionConfig] = []
    """Several functions, in place of `function`: the reward of a row is the weighted sum of those that take its
    `data_source`."""
    num_workers: Annotated[int, Meta(ge=0)] = 1
    """Worker processes; 0 = score inside the generator process, without a time limit (serial mode)."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 64
    """Most calls in flight in one worker, where a function is `async def`; other functions take one call at a time."""
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Wall-clock limit of one call, seconds; then it is cancelled, or the worker and all that the function started are
    killed, and `reward_status` is `timeout`."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest start of a worker, seconds: importing the functions, loading a reward model."""
    retries: Annotated[int, Meta(ge=0)] = 0
    """Further tries after an error or a timeout, before the trajectory is masked."""
    max_cpu_s: Annotated[int, Meta(ge=1)] | None = None
    """CPU time of one call, over the worker's threads, seconds; beyond it `reward_status` is `timeout`. A process that
    the function starts has as much for itself. null = as long as `timeout_s` lasts."""
    max_memory_mib: Annotated[int, Meta(ge=64)] | None = 4096
    """Memory that the worker may allocate, and each process that the function starts, MiB; beyond it an allocation
    fails, with `reward_status` `error`. null = no limit. Like `timeout_s`, not enforced with `num_workers=0`."""

    def __post_init__(self) -> None:
        names = [one.part for one in self.functions]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"generators.reward.functions must have different names, got {', '.join(twice)} more than once: give "
                "each a `name`."
            )

    @property
    def chosen(self) -> list[RewardFunctionConfig]:
        """The functions, whichever way they are written."""
        return self.functions or [RewardFunctionConfig(function=self.function, arguments=self.arguments)]

    @property
    def summary(self) -> str:
        """The functions by name, for messages."""
        return " + ".join(one.function for one in self.chosen)

    def check_data_source(self, data_source: str, *, found_in: str) -> None:
        """Raise ConfigError if no function takes this data source."""
        if not any(one.takes(data_source) for one in self.chosen):
            patterns = ", ".join(pattern for one in self.functions for pattern in one.data_sources)
            raise ConfigError(
                f"generators.reward.functions must have one for every row, got none for data_source {data_source!r} of "
                f"{found_in} (they take {patterns}): add a function, or a pattern to the `data_sources` of one."
            )


def with_arguments(function: str, arguments: dict[str, Any]) -> str:
    """Describe a call, for comparisons and messages: `search {"index":"data/index"}`."""
    return f"{function} {msgspec.json.encode(arguments, order='deterministic').decode()}" if arguments else function


class AgentConfig(Config, tag_field="kind"):
    """Agent loop: from a prompt to an answer of one turn or several."""

    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest time of an answer, seconds; then it is masked in training and counted, `reward_status` is `timeout`."""

    @property
    def reads_text(self) -> bool:
        """Whether the engine may have to end a turn at a text."""
        return True

    @property
    def executed(self) -> set[str]:
        """Code that it runs and addresses that it talks to, with their arguments."""
        return set()

    @property
    def calls(self) -> str:
        """Form of calls in the model's text for agents that talk to it through the door; empty for others."""
        return ""


class SingleTurnConfig(AgentConfig, tag="single_turn"):
    """One response to one prompt."""

    @property
    def reads_text(self) -> bool:
        return False


class ToolConfig(Config):
    """A tool that the model may call.

    Example: ToolConfig(function="my_tools:search", arguments={"top_k": 3}, timeout_s=5.0)
    """

    function: str
    """Built-in tool (docs/agents.md), or `module:name` of a function, sync or async, with annotated parameters and a
    docstring, or of a class whose instances are called: one for each answer, closed by its `close`, if any."""
    name: str = ""
    """Name that the model calls; empty: the function's own."""
    arguments: dict[str, Any] = {}
    """Keyword arguments that are bound to the function, or given to the class; the model does not see them."""
    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest call, seconds; then the model reads that it took too long."""
    max_calls: Annotated[int, Meta(ge=1)] | None = None
    """Most calls in one answer; null = no limit."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 64
    """Most calls at the same time, over all answers of a generator."""

    @property
    def executed(self) -> str:
        return with_arguments(self.function, self.arguments)


class ToolsAgentConfig(AgentConfig, tag="tools", kw_only=True):
    """Turns of the model and of the tools that it calls."""

    tools: list[ToolConfig | str]
    """Tools; a text stands for the `function` of one. A row's `extra_info.tool_selection` (names) leaves the others
    out."""
    format: str = "hermes"
    """Form of a call in the model's text: `hermes`, `json`, `react`, or `vllm:NAME` for a tool parser of vLLM's."""
    max_turns: Annotated[int, Meta(ge=1)] = 8
    """Most turns of the model."""
    max_parallel_calls: Annotated[int, Meta(ge=1)] = 4
    """Most calls of one turn that are answered; the model reads that the others were not."""
    max_result_characters: Annotated[int, Meta(ge=1)] = 2000
    """Longest result of a call, characters; the middle of a longer one is left out."""

    @property
    def executed(self) -> set[str]:
        return {tool if isinstance(tool, str) else tool.executed for tool in self.tools}


class InteractionConfig(Config):
    """A simulated user.

    Example: InteractionConfig(function="my_users:Teacher", name="teacher", arguments={"patience": 3})
    """

    function: str
    """`module:name` of a class with verl's methods `start_interaction`, `generate_response` and `finalize_interaction`,
    sync or async; docs/agents.md describes them."""
    name: str = ""
    """Name that a row gives in `interaction_kwargs`; empty: the class's own."""
    arguments: dict[str, Any] = {}
    """Record that the class is made with."""


class InteractionAgentConfig(ToolsAgentConfig, tag="interaction", kw_only=True):
    """Turns of the model and of a simulated user, who answers and scores each of them; with tools, if any."""

    interactions: list[InteractionConfig | str]
    """Simulated users; a text stands for the `function` of one. A row without `interaction_kwargs.name` gets the first.
    """
    tools: list[ToolConfig | str] = []
    """Tools, as of the agent `tools`; the user reads a turn without calls."""

    @property
    def executed(self) -> set[str]:
        users = [InteractionConfig(function=each) if isinstance(each, str) else each for each in self.interactions]
        return super().executed | {with_arguments(each.function, each.arguments) for each in users}


class SearchAgentConfig(AgentConfig, tag="search", kw_only=True):
    """Turns of the model and of a search, in the form of Search-R1."""

    index: str
    """Folder that `python -m slipstream.scripts.make_search_index` wrote, or address of a service with the API of
    Search-R1's retrieval server, such as http://127.0.0.1:8000/retrieve."""
    topk: Annotated[int, Meta(ge=1)] = 3
    """Passages of a search."""
    max_turns: Annotated[int, Meta(ge=1)] = 5
    """Most turns of the model, the last one for its answer."""
    max_turn_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of a turn; null = what is left of `sampling.max_tokens`."""
    max_observation_tokens: Annotated[int, Meta(ge=1)] = 500
    """Most tokens of the passages of a search; the end of longer ones is left out."""
    invalid_action: str = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try "
        "again.\n"
    )
    """Text after a turn that neither searches nor answers; empty = the answer ends there."""
    search_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest search, seconds; then the model reads that it took too long."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 64
    """Most searches at the same time, over all answers of a generator."""

    @property
    def executed(self) -> set[str]:
        return {with_arguments("search", {"index": self.index})}


class CustomAgentConfig(AgentConfig, tag="custom", kw_only=True):
    """An agent loop of the user's own."""

    function: str
    """`module:function` of `async def function(episode, **arguments)`; docs/agents.md describes the episode."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    door: bool = False
    """Whether the loop talks to the model by HTTP: then `episode.door` has an OpenAI-compatible address and a key."""
    format: str = "hermes"
    """Form of a call in the model's text, at the door: `hermes`, `json`, or `vllm:NAME`."""

    @property
    def calls(self) -> str:
        return self.format if self.door else ""

    @property
    def executed(self) -> set[str]:
        return {with_arguments(self.function, self.arguments)}


class ExternalAgentConfig(AgentConfig, tag="external"):
    """Agents outside of the generator, which take answers by HTTP."""

    silence_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest time between two requests of an agent, seconds. Then another agent gets the answer, or, once the model
    has written something, it is masked in training and counted."""
    format: str = "hermes"
    """Form of a call in the model's text: `hermes`, `json`, or `vllm:NAME`."""

    @property
    def calls(self) -> str:
        return self.format


class EnvironmentAgentConfig(AgentConfig, tag="environment", kw_only=True):
    """An environment in a process of its own, which plays the agent and scores the answer."""

    environment: str
    """Id of a verifiers environment (`gsm8k-v1`), or `module:function` or `file.py:function` of
    `async def function(row, model, **arguments)`."""
    arguments: dict[str, Any] = {}
    """Settings of the environment's task set, or keyword arguments of the function."""
    python: str = ""
    """Python of the process, such as that of a virtual environment with the environment's libraries; empty: this one's.
    """
    max_turns: Annotated[int, Meta(ge=1)] = 16
    """Most turns of the model; of a verifiers environment."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest start of the process, seconds."""
    silence_timeout_s: Annotated[float, Meta(gt=0)] = 8.0
    """Longest time without a sign of life, seconds; then the process is named in the log and the status, killed and
    started again. Its answers under way are masked in training and counted."""
    format: str = "hermes"
    """Form of a call in the model's text: `hermes`, `json`, or `vllm:NAME`."""

    @property
    def calls(self) -> str:
        return self.format

    @property
    def executed(self) -> set[str]:
        python = f" with {self.python}" if self.python else ""
        return {with_arguments(self.environment, self.arguments) + python}


AgentKind = (
    SingleTurnConfig
    | ToolsAgentConfig
    | SearchAgentConfig
    | InteractionAgentConfig
    | CustomAgentConfig
    | ExternalAgentConfig
    | EnvironmentAgentConfig
)


class GeneratorsConfig(Config):
    """The generator role: number, groups, engine, reward."""

    count: Annotated[int, Meta(ge=0)] = 1
    """Generators that the launcher starts; `scale generators=N` changes the number of a running run."""
    autoscale: AutoscaleConfig | None = None
    """Automatic scaling of that number; null = off."""
    group_size: Annotated[int, Meta(ge=1)] = 8
    """Sampled trajectories per prompt lease."""
    baseline: Literal["none", "greedy"] = "none"
    """`greedy`: one additional answer to each training prompt at temperature 0. It is not trained on: its reward is the
    baseline of the sampled ones (`algorithm/advantage=remax`)."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 256
    """Most trajectories in flight per generator; fewer while its engine has no room for them."""
    sampling: SamplingConfig = SamplingConfig()
    engine: VllmEngineConfig | HfEngineConfig | ScriptedEngineConfig = VllmEngineConfig()
    """Inference engine of a generator."""
    reward: RewardConfig = RewardConfig()
    agent: AgentKind = SingleTurnConfig()
    """Agent loop of rows without an `agent_name`."""
    agents: dict[str, AgentKind] = {}
    """Agent loops by the `agent_name` of rows; `single_turn` and verl's `single_turn_agent` need no entry."""

    @property
    def reads_text(self) -> bool:
        return any(agent.reads_text for agent in (self.agent, *self.agents.values()))

    @property
    def executed(self) -> set[str]:
        """Code that agents and tools run and addresses that they talk to, with their arguments."""
        return {each for agent in (self.agent, *self.agents.values()) for each in agent.executed}

    @property
    def has_baseline(self) -> bool:
        """Whether each group has a greedy member, its last."""
        return self.baseline == "greedy"

    @property
    def members_per_group(self) -> int:
        """Sampled members of a group, and its greedy one."""
        return self.group_size + self.has_baseline
