"""Settings of the generator role: engine, sampling, agents, rewards, scaling."""

import os
from fnmatch import fnmatchcase
from string import Template
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slipstream.configs.base import Config, ConfigError, Positive, require
from slipstream.configs.engines import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig


class AutoscaleConfig(Config):
    """Automatic scaling, by one generator at a time."""

    min: Annotated[int, Meta(ge=1)] = 1
    """Minimum number of generators."""
    max: Annotated[int, Meta(ge=1)] = 4
    """Maximum number of generators."""


class SamplingConfig(Config):
    """Sampling of training trajectories; evaluations set their own temperature."""

    temperature: Positive = 1.0
    """Divisor of the logits, in the engine and in the learner."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Probability mass of nucleus sampling; 1 = all tokens."""
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """Number of most likely tokens to sample from; -1 = all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Least probability of a token, as a fraction of the likeliest token's; 0 = all tokens. Evaluations use it too."""
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Maximum tokens that the model writes in an answer, over all turns."""
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    """Texts that end a turn, with the token that completes one; kept in the answer."""
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = []
    """Tokens that end a turn, in addition to the end tokens of tokenizer and generation config; kept in the answer."""
    ignore_eos: bool = False
    """Whether answers continue after an end token, for measurements."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never sampled, unlike in the learner's distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RewardFunctionConfig(Config):
    """One of several reward functions.

    Example: RewardFunctionConfig(function="gsm8k", data_sources=["openai/gsm8k"], weight=1.0, counts_for_accuracy=True)
    """

    function: str
    """As `generators.reward.function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments bound to the function."""
    name: str = ""
    """Name of the reward part with its weighted value; empty = the function's name."""
    weight: float = 1.0
    """Factor of its value in the sum; 0 = only report it, unweighted."""
    data_sources: list[str] = []
    """Rows to score: values of `data_source`, or patterns such as `math*`; empty = every row."""
    counts_for_accuracy: bool = False
    """Whether an answer counts as correct in `accuracy` only if this function says so. If none is marked, the first one
    that takes the row decides."""

    def takes(self, data_source: str) -> bool:
        """Whether it scores rows of this data source."""
        return not self.data_sources or any(fnmatchcase(data_source, pattern) for pattern in self.data_sources)

    @property
    def part(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class RewardConfig(Config):
    """Reward functions and their limits."""

    function: str = "exact_match"
    """A built-in function (docs/rewards.md), `module:function`, or `file.py:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments bound to the function."""
    functions: list[RewardFunctionConfig] = []
    """Several functions instead of `function`: the reward is the weighted sum of those that take the row's
    `data_source`."""
    num_workers: Annotated[int, Meta(ge=0)] = 1
    """Worker processes; 0 = score inside the generator process without a time limit (serial mode)."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 64
    """Maximum calls in flight per worker of `async def` functions; others take one call at a time."""
    timeout_s: Positive = 30.0
    """Wall-clock limit of one call, seconds. Beyond it, `reward_status` is `timeout`, and the call is canceled, or the
    worker and its processes are killed."""
    max_cpu_s: Annotated[int, Meta(ge=1)] | None = None
    """CPU time of one call, summed over the threads of the worker, and of each process that it starts, seconds; beyond
    it, `reward_status` is `timeout`. null = only `timeout_s` ends a call."""
    max_memory_mib: Annotated[int, Meta(ge=64)] | None = 4096
    """Memory of the worker, and of each process that it starts, MiB; allocations beyond it fail with `reward_status`
    `error`. null = no limit. Like `timeout_s`, not enforced with `num_workers=0`."""

    def __post_init__(self) -> None:
        names = [one.part for one in self.functions]
        twice, key = sorted({name for name in names if names.count(name) > 1}), "generators.reward.functions"
        got = f"{', '.join(twice)} more than once"
        require(not twice, key, "have unique names", got=got, why="give each one a `name`")

    @property
    def chosen(self) -> list[RewardFunctionConfig]:
        """`functions`, or the single `function` as a list."""
        return self.functions or [RewardFunctionConfig(function=self.function, arguments=self.arguments)]

    @property
    def summary(self) -> str:
        return " + ".join(one.function for one in self.chosen)

    def check_data_source(self, data_source: str, *, found_in: str) -> None:
        """Raise ConfigError if no function takes these rows."""
        patterns = ", ".join(pattern for one in self.functions for pattern in one.data_sources)
        is_taken = any(one.takes(data_source) for one in self.chosen)
        why = "add a function, or a pattern to the `data_sources` of one"
        got = f"none for data_source {data_source!r} of {found_in} (they take {patterns})"
        require(is_taken, "generators.reward.functions", "have one for every row", got=got, why=why)


def with_arguments(function: str, arguments: dict[str, Any]) -> str:
    """Describe a call: `search {"index":"data/index"}`."""
    return f"{function} {msgspec.json.encode(arguments, order='deterministic').decode()}" if arguments else function


class AgentConfig(Config, tag_field="kind"):
    """Agent loop: from a prompt to an answer with one or more turns."""

    @property
    def reads_text(self) -> bool:
        """Whether the engine may end a turn at a text."""
        return True

    @property
    def executed(self) -> set[str]:
        """Code that it runs and addresses that it contacts."""
        return set()

    @property
    def calls(self) -> str:
        """Tool call format at the OpenAI-compatible endpoint; empty if the agent does not use it."""
        return ""


class SingleTurnConfig(AgentConfig, tag="single_turn"):
    """One response to one prompt."""

    @property
    def reads_text(self) -> bool:
        return False


class ToolConfig(Config):
    """A tool that the model can call.

    Example: ToolConfig(function="my_tools:search", arguments={"top_k": 3}, timeout_s=5.0)
    """

    function: str
    """Built-in tool (docs/agents.md), or `module:name` of a sync or async function with annotated parameters and a
    docstring, or of a class: one callable instance per answer, closed by `close` if present."""
    name: str = ""
    """Name for the model; empty = the function's name."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function or class, hidden from the model."""
    timeout_s: Positive = 30.0
    """Longest call, seconds; beyond it, the model reads an error."""
    max_calls: Annotated[int, Meta(ge=1)] | None = None
    """Maximum calls per answer; null = no limit."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 64
    """Maximum concurrent calls over all answers of a generator."""

    @property
    def executed(self) -> str:
        return with_arguments(self.function, self.arguments)


def from_environment(values: dict[str, str], *, found_in: str) -> dict[str, str]:
    """Replace $NAME by environment variables. Raises ConfigError."""
    try:
        return {key: Template(value).substitute(os.environ) for key, value in values.items()}
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{found_in} may use $NAME for a variable that is set in the generator's environment, and $$ for a dollar "
            f"sign: {type(error).__name__}: {error}."
        ) from None


class ToolsAgentConfig(AgentConfig, tag="tools", kw_only=True):
    """Alternating turns of the model and its tools."""

    tools: list[ToolConfig | str]
    """Tools; a string is short for a `function`. A row's `extra_info.tool_selection` (names) excludes all others."""
    tool_call_format: str = "hermes"
    """Format of a tool call in the text: `hermes`, `json`, `react`, or `vllm:NAME` for a vLLM tool parser."""
    max_turns: Annotated[int, Meta(ge=1)] = 16
    """Maximum turns of the model."""
    max_parallel_calls: Annotated[int, Meta(ge=1)] = 4
    """Maximum calls executed per turn; for the others, the model reads an error."""
    max_result_characters: Annotated[int, Meta(ge=1)] = 2000
    """Longest result, characters; longer ones lose their middle."""

    @property
    def executed(self) -> set[str]:
        return {tool if isinstance(tool, str) else tool.executed for tool in self.tools}


class InteractionConfig(Config):
    """A simulated user.

    Example: InteractionConfig(function="my_users:Teacher", name="teacher", arguments={"patience": 3})
    """

    function: str
    """`module:name` of a class with verl's methods `start_interaction`, `generate_response`, and
    `finalize_interaction`, sync or async; see docs/agents.md."""
    name: str = ""
    """Name used in `interaction_kwargs` of a row; empty = the class name."""
    arguments: dict[str, Any] = {}
    """Record passed to the constructor."""


class InteractionAgentConfig(ToolsAgentConfig, tag="interaction", kw_only=True):
    """Alternating turns of the model and a simulated user that scores each turn; tools are optional."""

    interactions: list[InteractionConfig | str]
    """Simulated users; a string is short for a `function`. A row without `interaction_kwargs.name` uses the first."""
    tools: list[ToolConfig | str] = []
    """Tools, as for the `tools` agent; the user reads the turns without calls."""

    @property
    def executed(self) -> set[str]:
        users = [InteractionConfig(function=each) if isinstance(each, str) else each for each in self.interactions]
        return super().executed | {with_arguments(each.function, each.arguments) for each in users}


class SearchAgentConfig(AgentConfig, tag="search", kw_only=True):
    """Alternating turns of the model and a search, in the Search-R1 format."""

    index: str
    """Folder written by `python -m slipstream.scripts.make_search_index`, or address of a service with the API of the
    Search-R1 retrieval server, such as http://127.0.0.1:8000/retrieve."""
    num_passages: Annotated[int, Meta(ge=1)] = 3
    """Passages per search."""
    max_turns: Annotated[int, Meta(ge=1)] = 16
    """Maximum turns of the model, including the final answer."""
    max_observation_tokens: Annotated[int, Meta(ge=1)] = 500
    """Maximum tokens of the passages of one search; the rest is cut off."""
    invalid_action: str = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try "
        "again.\n"
    )
    """Text after a turn that neither searches nor answers; empty = end the answer."""

    @property
    def executed(self) -> set[str]:
        return {with_arguments("search", {"index": self.index})}


class CustomAgentConfig(AgentConfig, tag="custom", kw_only=True):
    """A user-defined agent loop."""

    function: str
    """`module:function` of `async def function(episode, **arguments)`; docs/agents.md describes the episode."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    tool_call_format: str = ""
    """Format of tool calls at the OpenAI-compatible address that `episode.door` has with a key: `hermes`, `json`, or
    `vllm:NAME`; empty = the loop doesn't use the model over HTTP."""

    @property
    def calls(self) -> str:
        return self.tool_call_format

    @property
    def executed(self) -> set[str]:
        return {with_arguments(self.function, self.arguments)}


class ExternalAgentConfig(AgentConfig, tag="external"):
    """Agents outside the generator that take answers over HTTP."""

    tool_call_format: str = "hermes"
    """Format of tool calls in the text: `hermes`, `json`, or `vllm:NAME`."""

    @property
    def calls(self) -> str:
        return self.tool_call_format


class EnvironmentAgentConfig(AgentConfig, tag="environment", kw_only=True):
    """An environment in a separate process that acts as the agent and scores the answer."""

    environment: str
    """Id of a verifiers environment (`gsm8k-v1`), or `module:function` or `file.py:function` of `async def
    function(row, model, **arguments)`."""
    arguments: dict[str, Any] = {}
    """Settings of the environment's task set, or keyword arguments of the function."""
    python: str = ""
    """Python interpreter of the process, such as that of a virtual environment with its libraries; empty = the current
    one."""
    max_turns: Annotated[int, Meta(ge=1)] = 16
    """Maximum turns of the model in a verifiers environment."""
    tool_call_format: str = "hermes"
    """Format of tool calls in the text: `hermes`, `json`, or `vllm:NAME`."""

    @property
    def calls(self) -> str:
        return self.tool_call_format

    @property
    def executed(self) -> set[str]:
        python = f" with {self.python}" if self.python else ""
        return {with_arguments(self.environment, self.arguments) + python}


AgentKind = (
    SingleTurnConfig | ToolsAgentConfig | SearchAgentConfig | InteractionAgentConfig | CustomAgentConfig
    | ExternalAgentConfig | EnvironmentAgentConfig
)  # fmt: skip


class GeneratorsConfig(Config):
    """The generator role: number, groups, engine, agents, rewards."""

    count: Annotated[int, Meta(ge=0)] = 1
    """Generators that the launcher starts; `slipstream scale generators=N` changes it during a run."""
    autoscale: AutoscaleConfig | None = None
    """Automatic scaling of this number; null = off."""
    group_size: Annotated[int, Meta(ge=1)] = 8
    """Answers per prompt; most advantages compare the answers of such a group."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 256
    """Maximum trajectories in flight per generator; fewer while the KV cache of its engine is full."""
    sampling: SamplingConfig = SamplingConfig()
    engine: VllmEngineConfig | HfEngineConfig | ScriptedEngineConfig = VllmEngineConfig()
    """Inference engine of a generator."""
    reward: RewardConfig = RewardConfig()
    agent: AgentKind = SingleTurnConfig()
    """Agent loop of rows without `agent_name`."""
    answer_timeout_s: Positive = 600.0
    """Longest duration of an answer, seconds; beyond it, its `reward_status` is `timeout`, and it is masked in
    training."""
    agents: dict[str, AgentKind] = {}
    """Agent loops by `agent_name` of the row. `single_turn` and verl's names need no entry: `single_turn_agent` is the
    single turn, `tool_agent` and `react_agent` are the first agent with tools."""

    @property
    def agents_by_name(self) -> dict[str, tuple[AgentKind, str]]:
        """`agent_name` of a row -> agent and its setting."""
        found: dict[str, tuple[AgentKind, str]] = {"": (self.agent, "generators.agent")}
        found |= {name: (agent, f"generators.agents.{name}") for name, agent in self.agents.items()}
        single = found.get("single_turn", (SingleTurnConfig(), "generators.agents.single_turn"))
        tools = next((each for each in found.values() if isinstance(each[0], ToolsAgentConfig)), None)
        verl = {"single_turn": single, "single_turn_agent": single, "tool_agent": tools, "react_agent": tools}
        return {name: agent for name, agent in verl.items() if agent} | found

    def describe_missing(self, agent_name: str, *, row: str) -> str:
        """Describe an unknown `agent_name`."""
        return (
            f"{row} names the agent {agent_name!r}, so generators.agents must have it, got "
            f"{', '.join(self.agents) or 'none'}: add it, or remove the column agent_name"
        )

    @property
    def reads_text(self) -> bool:
        return bool(self.sampling.stop) or any(agent.reads_text for agent in (self.agent, *self.agents.values()))

    @property
    def executed(self) -> set[str]:
        """Code that agents run and addresses that they contact."""
        return {each for agent in (self.agent, *self.agents.values()) for each in agent.executed}
