"""From a prompt to a scored trajectory: engine, sampling, agent loop, reward."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config


# @@ Autoscale: how many generators a launcher keeps, by which side waits for the other.
class AutoscaleConfig(Config):
    """Between `min` and `max` generators, one more or less at a time."""

    min: Annotated[int, Meta(ge=1)] = 1
    """Fewest."""
    max: Annotated[int, Meta(ge=1)] = 4
    """Most."""
    more_above: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """One more when the learner waits for groups for a larger share of its time."""
    fewer_below: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """One less when the generators run a smaller share of what they could together, and one less could still run it."""
    settle_s: Annotated[float, Meta(gt=0)] = 60.0
    """Time that is measured before each change, seconds; begins when the learner and all generators are at work."""
    absent_after_s: Annotated[float, Meta(gt=0)] = 600.0
    """A generator that is not at work for longer is waited for no more: the others are measured without it, seconds."""


class SamplingConfig(Config):
    """How tokens are drawn while training."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Logits are divided by it; the learner does the same."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 = off."""
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """Number of likeliest tokens kept; -1 = off."""
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    """Longest response, tokens."""


class VllmEngineConfig(Config, tag="vllm", tag_field="kind"):
    """vLLM's AsyncLLM, on GPUs or on the CPU build."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Sequences decoded together."""
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """GPUs one engine spans."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Share of each GPU's memory; unused on a CPU."""
    cpu_kv_cache_gib: Annotated[int, Meta(ge=1)] = 1
    """Memory for the KV cache on a CPU, GiB."""
    enforce_eager: bool = True
    """No compiled graphs: starts fast; set false on GPUs for speed."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of running requests when weights change: they go on over it | it is computed anew,
    so that every token is what its version alone would have sampled; costs a prefill of all that runs."""
    enable_prefix_caching: bool = False
    """Prompts that begin alike are computed once; never taken from one version for another."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Longest start, seconds."""
    stall_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest time without a step while requests are open, seconds; then the generator ends, and is started again."""


class HfEngineConfig(Config, tag="hf", tag_field="kind"):
    """transformers in this process: one batch at a time, deterministic. The serial mode's engine."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Sequences decoded together."""


class ScriptedEngineConfig(Config, tag="scripted", tag_field="kind"):
    """Fixed tokens at fixed times, without a model: for protocol and chaos tests."""

    tokens_per_response: Annotated[int, Meta(ge=1)] = 6
    """Length of every response, tokens."""
    seconds_per_token: Annotated[float, Meta(ge=0)] = 0.0
    """Pretended decoding time, seconds."""


class RewardConfig(Config):
    """Which function scores a trajectory, and how long it may take."""

    function: str = "slipstream.generators.rewards.functions:position_match"
    """Dotted path `module:function`; see `generators/rewards/reward.py` for its signature."""
    arguments: dict[str, Any] = {}
    """Keyword arguments bound to it."""
    num_workers: Annotated[int, Meta(ge=0)] = 1
    """Worker processes; 0 = score inside the generator process, without a time limit (serial mode)."""
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Wall-clock limit of one call, seconds; then the worker is killed and `reward_status` says timeout."""


class GeneratorsConfig(Config):
    """The generator role."""

    count: Annotated[int, Meta(ge=0)] = 1
    """How many `run_async.py` starts; `run_async.py scale generators=N` changes it while the run goes on."""
    autoscale: AutoscaleConfig | None = None
    """Changes it by itself; off while null."""
    group_size: Annotated[int, Meta(ge=1)] = 8
    """Sampled trajectories per prompt lease."""
    baseline: Literal["none", "greedy"] = "none"
    """greedy: one more answer to each training prompt, at temperature 0. It is not trained on: its reward is what those
    of the sampled ones are compared with (`algorithm/advantage=remax`)."""
    max_concurrency: Annotated[int, Meta(ge=1)] = 256
    """Trajectories in flight per generator at most; fewer while its engine has no room for them."""
    sampling: SamplingConfig = SamplingConfig()
    """Training-time sampling; evaluation overrides the temperature."""
    engine: VllmEngineConfig | HfEngineConfig | ScriptedEngineConfig = VllmEngineConfig()
    """What turns token ids into token ids."""
    reward: RewardConfig = RewardConfig()
    """What turns a response into a number."""

    @property
    def has_baseline(self) -> bool:
        """Whether each group has a greedy member, its last."""
        return self.baseline == "greedy"

    @property
    def members_per_group(self) -> int:
        """Sampled ones, and the greedy one where there is one."""
        return self.group_size + self.has_baseline
